"""llguidance and xgrammar on the same schemas: `libraries.py FOLDER`, in an environment with both and transformers.

FOLDER has a tokenizer. Prints one JSON object, with times in ms and, of masks, in microseconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))

from scripts.programs.bench.structured.schemas import ANSWERS, BIG, SMALL

ROUNDS = 5
# A matcher: "fill" computes the next token's mask, "go" accepts a token and says whether it may follow.
Walk = tuple[Callable[[], Any], Callable[[int], bool]]


def timed_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = work()
    return round(1000 * (time.perf_counter() - began), 3), made


def mask_figures(walks: list[list[int]], begin: Callable[[], Walk]) -> dict[str, float]:
    """Times of the masks of all positions of each walk, without those of the first round."""
    times: list[float] = []
    for number in range(ROUNDS + 1):
        for ids in walks:
            fill, go = begin()
            for id in ids:
                took, _ = timed_ms(fill)
                if number:
                    times.append(1000 * took)
                assert go(id), f"token {id} is not allowed"
    return {"median": round(median(times), 1), "mean": round(mean(times), 1), "longest": round(max(times), 1)}


def llguidance_figures(tokenizer: Any, vocab: int, walks: list[list[int]]) -> dict[str, Any]:
    import llguidance
    import llguidance.hf

    prepared_ms, vocabulary = timed_ms(lambda: llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab))

    def compiled(schema: Any) -> Any:
        text = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_pattern": r"[ \n]"}}}]})
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        matcher.compute_bitmask()
        return matcher

    report: dict[str, Any] = {"version": llguidance.__version__, "vocabulary_ms": prepared_ms}
    report["small_with_first_mask_ms"], small = timed_ms(lambda: compiled(SMALL))
    report["big_with_first_mask_ms"], _ = timed_ms(lambda: compiled(BIG))

    def begin() -> Walk:
        matcher = small.deep_copy()
        return matcher.compute_bitmask, matcher.consume_token

    return {**report, "mask_us": mask_figures(walks, begin)}


def xgrammar_figures(tokenizer: Any, vocab: int, walks: list[list[int]]) -> dict[str, Any]:
    import xgrammar

    prepared_ms, info = timed_ms(lambda: xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab))
    compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    words = xgrammar.allocate_token_bitmask(1, vocab)

    def compiled(schema: Any) -> Any:
        made = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        xgrammar.GrammarMatcher(made).fill_next_token_bitmask(words)
        return made

    report: dict[str, Any] = {"version": version("xgrammar"), "vocabulary_ms": prepared_ms}
    report["small_with_first_mask_ms"], small = timed_ms(lambda: compiled(SMALL))
    report["big_with_first_mask_ms"], _ = timed_ms(lambda: compiled(BIG))

    def begin() -> Walk:
        matcher = xgrammar.GrammarMatcher(small)
        return lambda: matcher.fill_next_token_bitmask(words), matcher.accept_token

    return {**report, "mask_us": mask_figures(walks, begin)}


def main(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab = len(tokenizer)
    walks = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    print(
        json.dumps(
            {
                "llguidance": llguidance_figures(tokenizer, vocab, walks),
                "xgrammar": xgrammar_figures(tokenizer, vocab, walks),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
