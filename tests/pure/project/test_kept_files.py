"""Files that version 0.1.0 has written are read by this one: plans, spent tokens, batches, measured speeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.api.test_batches import add_lines
from weft.api.batches.store import Store
from weft.checkpoint.files.sharded import ShardedState
from weft.fleet.accounts.ledger import HOUR_S, Amount, Ledger
from weft.planner.report.plan_file import load_plan_file
from weft.probes import stored_speeds
from weft.probes.stored_speeds import GpuSpeed, Speeds

KEPT = Path(__file__).parents[2] / "data/compat/0.1.0"
FILES = KEPT / "files"
HOUR = 500_000  # of the ledger's rows, since 1970
SPENT = Amount(prompt_tokens=30, completion_tokens=100, dollars=0.75)


def write(folder: Path) -> None:
    """Write the files as this version does."""
    folder.mkdir()
    ledger = Ledger(str(folder / "ledger.sqlite"), lambda: HOUR * float(HOUR_S))
    ledger.settle(ledger.reserve("team-a", "m", "u", SPENT), SPENT)
    ledger.close()
    store = Store(folder / "store")
    add_lines(store, ["a", "b"])
    store.add_result("batch_1", 0, b'{"custom_id": "a"}', failed=False)
    store.close()
    (folder / "speeds.json").write_bytes(msgspec.json.encode(measured()))


def measured() -> Speeds:
    gpu = GpuSpeed(gpu="GPU-0", copy_Bps=1.8e12, from_host_Bps=2e10, to_host_Bps=2e10)
    return Speeds(machine="0.1.0", gpus=(gpu,))


@pytest.fixture
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the kept files."""
    if request.config.getoption("--update-golden"):
        shutil.rmtree(FILES, ignore_errors=True)
        write(FILES)
    shutil.copytree(FILES, tmp_path / "files")
    return tmp_path / "files"


def test_the_layout_of_shards_is_read_and_written_alike() -> None:
    """Weights that `weft shard` cut may be all that is kept of a model, and older versions read new ones."""
    text = (KEPT / "shards/sharded_state.json").read_text()
    state = msgspec.json.decode(text, type=ShardedState)
    assert [len(place.q_heads) for place in state.places] == [2, 2]
    written, kept = json.loads(msgspec.json.encode(state)), json.loads(text)
    for place in written["places"]:
        assert place.pop("other_heads") == []
    assert written == kept


def test_plans_are_read(tmp_path: Path) -> None:
    plans: dict[str, Any] = json.loads((KEPT / "plans.json").read_text())
    runnable = [kept["plan"] for kept in plans.values() if kept["status"] == 0]
    assert len(runnable) > 20
    for plan in runnable:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan))
        assert len(load_plan_file(str(file)).layout.ranks) == len(plan["best"]["ranks"])


def test_spent_tokens_stay_spent(kept: Path) -> None:
    ledger = Ledger(str(kept / "ledger.sqlite"), lambda: HOUR * float(HOUR_S))
    assert (ledger.tokens("team-a", 1), ledger.dollars(1)) == (SPENT.tokens, SPENT.dollars)
    ledger.close()


def test_batches_go_on(kept: Path) -> None:
    store = Store(kept / "store")
    (batch,) = store.unfinished()
    assert store.answered(batch.id) == {0}
    assert list(store.results(batch.id, failed=False)) == [b'{"custom_id": "a"}']
    store.close()


def test_measured_speeds_count(kept: Path) -> None:
    read = msgspec.json.decode((kept / "speeds.json").read_bytes(), type=Speeds)
    assert read.version == stored_speeds.VERSION, "a higher version measures again, which is a line in CHANGELOG.md"
    assert read.gpus == measured().gpus
