"""`scripts/conformance`: what clients rely on, asked of any server, one request after the other."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from scripts.programs.conformance import history_cases, openai_cases, other_cases
from scripts.programs.conformance.case import Api, Case, Failed
from scripts.programs.conformance.golden_cases import FAMILIES, golden_cases


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        rows = asyncio.run(run_cases(arguments))
    except (httpx.HTTPError, Failed) as error:
        print(f"{arguments.base_url}: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2
    failed = [row["case"] for row in rows if not row["passed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} cases passed", file=sys.stderr)
    print(json.dumps({"base_url": arguments.base_url, "cases": rows, "failed": failed}, indent=1))
    return 1 if failed else 0


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="the server, as http://127.0.0.1:8000")
    parser.add_argument("--model", help="one of its models (default: the first that it lists)")
    parser.add_argument("--api-key", help="key of the server")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name has this text")
    parser.add_argument("--family", choices=FAMILIES, default="hermes", help="whose golden answers its model gives")
    return parser.parse_args(words)


async def run_cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case. Raises httpx.HTTPError and Failed if the server lists no models."""
    api = Api(arguments.base_url.rstrip("/").removesuffix("/v1"), arguments.model or "", arguments.api_key)
    async with api.client:
        models = (await api.ask("GET", "/v1/models")).json.get("data") or []
        if not models:
            raise Failed("it lists no models")
        api.model = api.model or models[0]["id"]
        cases = [*openai_cases.CASES, *other_cases.CASES, *history_cases.CASES]
        if any(row.get("owned_by") == "weft" for row in models):
            cases += golden_cases(arguments.family)
        return [await judge(api, case) for case in cases if arguments.only in case.name]


async def judge(api: Api, case: Case) -> dict[str, Any]:
    """Run a case, and print its row of the table."""
    began, reason = time.monotonic(), ""
    try:
        await case.run(api)
    except Failed as error:
        reason = str(error)
    except (httpx.HTTPError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"  # an answer of another shape
    seconds = round(time.monotonic() - began, 3)
    print(f"{'fail' if reason else 'pass'}  {seconds:6.2f} s  {case.name:44} {reason}".rstrip(), file=sys.stderr)
    return {"case": case.name, "passed": not reason, "reason": reason or None, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
