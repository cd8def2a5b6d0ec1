"""Rank 1 of the tests' pairs: carries out one test's steps after another's, on models and trials that it is told."""

import sys
from pathlib import Path

import torch

from engine.grammar import LabelSets
from engine.group import join
from engine.lifetime import die_with_parent
from engine.loading import build_runner, load_decoder, open_model
from engine.models.decoder import Decoder
from engine.sampler import Sampler
from engine.tensor_parallel import RankConnection, Ranks, RankStep, Tree
from tests.engine.generation import Trial, cache_for, settings_of

CPU = torch.device("cpu")


def main() -> None:
    die_with_parent()
    connection = RankConnection(int(sys.argv[1]))
    hello = connection.receive()
    torch.set_num_threads(1)
    group = join(hello["port"], hello["rank"], hello["size"], CPU)
    decoders: dict[str, Decoder] = {}
    told: Tree = connection.receive()
    try:
        while True:
            path = told["path"]
            if path not in decoders:
                decoders[path] = load_decoder(open_model(Path(path)), torch.float32, CPU, 512, group=group)
            decoder, trial = decoders[path], Trial(**told["trial"])
            max_model_len = min(decoder.num_positions, trial.kv_cache_tokens)
            sampler, cache = Sampler(LabelSets((), lambda: ())), cache_for(decoder, trial)
            runner = build_runner(decoder, cache, sampler, settings_of(trial), max_model_len, Ranks())
            while "path" not in (told := connection.receive()):
                if "hidden" in told:
                    with torch.inference_mode():
                        decoder.greedy(decoder.logits(torch.from_numpy(told["hidden"])))
                else:
                    runner.follow(RankStep(**told))
    except BaseException as error:
        connection.fail(error)
        raise


if __name__ == "__main__":
    main()
