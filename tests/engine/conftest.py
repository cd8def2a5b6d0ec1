"""The real model, where it has been fetched, and transformers' own reading of it (seconds long, so once)."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.model_download import DEMO_MODEL, cache_folder


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The demo's GGUF file in the cache folder; `make test` fetches it first."""
    path = cache_folder() / DEMO_MODEL.file_name
    if not path.is_file():
        pytest.skip(f"the real model is not in {path.parent}; `make test` or `make demo` fetches it")
    return path


@pytest.fixture(scope="session")
def real_transformers_tokenizer(real_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(real_model.parent), gguf_file=real_model.name)
