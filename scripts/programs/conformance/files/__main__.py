"""`scripts/conformance files`: models whose files are damaged or hostile end in success or one clear line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from scripts.programs.conformance.files.changes import changes_of
from scripts.programs.conformance.files.seeds import write_seeds
from scripts.programs.conformance.files.trial import Verdict, try_model

SECONDS, LONG_SECONDS = 60, 1200
PLAIN_WEIGHT = 4  # the plain model has the most files


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parse(words)
    seconds = arguments.seconds or (LONG_SECONDS if arguments.long else SECONDS)
    counts: Counter[str] = Counter()
    faults = []
    with tempfile.TemporaryDirectory(prefix="weft-files-") as folder:
        for label, verdict in trials(Path(folder), arguments.seed, seconds=seconds, cases=arguments.cases):
            counts[verdict.outcome] += 1
            if verdict.fault:
                faults.append({"case": label, "fault": verdict.fault, "line": verdict.line})
                print(f"{label}: {verdict.fault}: {verdict.line[-2000:]}", file=sys.stderr)
    print(f"{sum(counts.values()) - len(faults)} of {sum(counts.values())} models passed", file=sys.stderr)
    print(json.dumps({"seed": arguments.seed, "outcomes": counts, "faults": faults}, indent=1))
    return 1 if faults else 0


def trials(
    folder: Path, seed: int, *, seconds: float | None = None, cases: int | None = None
) -> Iterator[tuple[str, Verdict]]:
    """Yield what came of each damaged model, until the time or the number of cases is up.

    A case is drawn by the seed and its number.
    """
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    _import_engine()
    models, began, number = write_seeds(folder / "seeds"), time.monotonic(), 0
    for model in models:
        yield f"{model.name} as it is", _as_read(try_model(model, folder))
    while (seconds is None or time.monotonic() - began < seconds) and (cases is None or number < cases):
        random = Random(f"{seed}-{number}")
        model = random.choices(models, [PLAIN_WEIGHT if model.name == "plain" else 1 for model in models])[0]
        target = folder / "trial" / model.name
        shutil.copytree(model, target)
        label = f"{seed}-{number} {model.name}: {_damage(target, random)}"
        yield label, try_model(target, folder)
        shutil.rmtree(target)
        number += 1


def _as_read(verdict: Verdict) -> Verdict:
    """A valid model must be read."""
    return verdict._replace(fault=verdict.fault or verdict.outcome.replace("read", ""))


def _damage(folder: Path, random: Random) -> str:
    """Change one file of a model, rarely two."""
    told = []
    for _ in range(1 if random.random() < 0.8 else 2):
        path = random.choice(sorted(path for path in folder.iterdir() if path.is_file()) or [folder])
        if path != folder:
            told.append(f"{path.name} {_change(path, random)}")
    return ", ".join(told)


def _change(path: Path, random: Random) -> str:
    try:
        return random.choice(changes_of(path))(path, random)
    except Exception as error:  # the second change of a file that the first has destroyed
        return f"not changed ({type(error).__name__})"


def _import_engine() -> None:
    """Import once what every child needs, and leave no thread behind: forks have only the one that makes them."""
    import torch

    import weft.checkpoint.lookup
    import weft.engine.text.tokenizer
    import weft.plan.layout
    import weft.ranks.weights.load  # noqa: F401

    torch.set_num_threads(1)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/conformance files", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another number draws other cases (default: 0)")
    parser.add_argument("--seconds", type=float, help=f"time for all cases (default: {SECONDS})")
    parser.add_argument("--cases", type=int, help="number of cases at most")
    parser.add_argument("--long", action="store_true", help=f"take {LONG_SECONDS:,} seconds")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
