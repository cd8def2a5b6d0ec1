"""The README's first task, as it stands there, from a clean folder; only addresses and model are the test's."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from pipeline.embedded import EmbeddedServer

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks(section: str, language: str) -> list[str]:
    text = README.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [content for name, content in fenced if name == language]


def test_the_readmes_first_task_ends_in_two_labelled_rows(tmp_path: Path, tiny_model: Path) -> None:
    (toml,), (reviews,), (commands,) = (blocks("A first task of your own", kind) for kind in ("toml", "json", ""))
    with EmbeddedServer() as server:
        own = {
            "localhost:9092": server.kafka_address,
            "http://localhost:9200": server.elasticsearch_url,
            "models/Qwen2.5-7B-Instruct": str(tiny_model),
        }
        for written, ours in own.items():
            assert written in toml
            toml = toml.replace(written, ours)
        (tmp_path / "pagemill.toml").write_text(toml)
        (tmp_path / "reviews.jsonl").write_text(reviews)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PAGEMILL_")}
        environment |= {f"PAGEMILL_KAFKA__{key.upper()}": json.dumps(value) if isinstance(value, list) else value
                        for key, value in server.kafka_settings().items()}  # fmt: skip
        environment |= {"PAGEMILL_MODEL__DTYPE": "float32", "PAGEMILL_WORKER__HTTP_PORT": "0", "OMP_NUM_THREADS": "1"}

        output = ""
        for line in commands.strip().splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "pagemill"
            result = subprocess.run(
                [sys.executable, "-m", "pipeline.cli", *arguments],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert result.returncode == 0, (line, result.stdout, result.stderr)
            output = result.stdout
    assert "r1" in output
    assert "r2" in output
    assert len(re.findall("positive|negative", output)) == 2
