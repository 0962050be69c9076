"""`scripts/bench structured`: the cost of constrained answers, and whether all of them are valid.

32 requests with as many tokens each, in turns: free, and constrained to lists of objects with tight and with wide
bounds of their texts; in tokens per second. 100 answers to a schema with bounded fields, at temperatures from 0 to 1.
`--xgrammar PYTHON FOLDER` also compares the library with xgrammar: PYTHON has both and transformers, FOLDER the demo's
tokenizer (`scripts/bench peers` makes both kinds of environment).
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema

from scripts.programs.bench.structured.schemas import SMALL, WIDE, many
from weft import LLM, SamplingParams, StructuredOutputsParams

ROWS, TOKENS = 32, 64
ANSWERS, ANSWER_TOKENS = 100, 200
PROMPT = "Write about person number {} of the village, with a name, an age and some tags, as JSON."


def prompts(number: int, round: int) -> list[str]:
    """Prompts that no earlier round had: the prefix cache helps none of them."""
    return [f"{round}. " + PROMPT.format(1000 * round + row) for row in range(number)]


KINDS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "tight": {"structured_outputs": {"json": many(SMALL)}},
    "wide": {"structured_outputs": {"json": many(WIDE)}},
}


def tokens_per_s(llm: LLM, round: int, wanted: dict[str, Any]) -> float:
    """Output tokens per second of one run."""
    params = [SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=row, **wanted) for row in range(ROWS)]
    began = time.perf_counter()
    outputs = llm.generate(prompts(ROWS, round), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == [TOKENS] * ROWS, made
    return sum(made) / seconds


def count_valid(llm: LLM) -> int:
    """Number of valid answers of ANSWERS, at temperatures from 0 to 1."""
    params = [
        SamplingParams(
            max_tokens=ANSWER_TOKENS,
            temperature=row / (ANSWERS - 1),
            seed=row,
            structured_outputs=StructuredOutputsParams(json=SMALL),
        )
        for row in range(ANSWERS)
    ]
    valid = 0
    for output in llm.generate(prompts(ANSWERS, 0), params, use_tqdm=False):
        answer = output.outputs[0]
        try:
            jsonschema.validate(json.loads(answer.text), SMALL)
            valid += answer.finish_reason == "stop"
        except (ValueError, jsonschema.ValidationError):
            print(f"not valid: {answer.text!r}, {answer.finish_reason}")
    return valid


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench structured", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--xgrammar", nargs=2, metavar=("PYTHON", "FOLDER"))
    given = parser.parse_args()
    report: dict[str, Any] = {}
    with LLM(given.model, max_model_len=512, max_num_seqs=ROWS, kv_cache_memory_bytes=2**29) as llm:
        report |= {"answers": ANSWERS, "valid": count_valid(llm)}
        for number, wanted in enumerate(KINDS.values(), start=1):
            tokens_per_s(llm, number, wanted)  # with what is computed once
        runs = [
            {
                name: tokens_per_s(llm, len(KINDS) * (round + 1) + number, wanted)
                for number, (name, wanted) in enumerate(KINDS.items(), start=1)
            }
            for round in range(given.rounds)
        ]
    report["rows"] = ROWS
    for name in KINDS:
        report[f"{name}_tokens_per_s"] = [round(run[name], 1) for run in runs]
    for name in list(KINDS)[1:]:
        report[f"{name}_ratio"] = round(median(run[name] / run["free"] for run in runs), 3)
    if given.xgrammar:
        python, folder = given.xgrammar
        compare = Path(__file__).with_name("libraries.py")
        report["libraries"] = json.loads(subprocess.check_output([python, str(compare), folder], text=True))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
