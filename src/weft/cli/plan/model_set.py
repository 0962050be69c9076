"""weft plan --config FILE: where each model of a set lives, its bytes awake and asleep, and the seconds to wake it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from weft.cli.dispatch import fail
from weft.cli.flags.declared import flag_groups
from weft.cli.flags.plan_flags import PlanArguments
from weft.cli.parser import UsageError
from weft.errors import PlanError
from weft.fleet.hosting.model_set import ModelSet
from weft.fleet.hosting.set_plan import HOST, ModelPlan, SetPlan, plan_set
from weft.formatting import format_bytes

# Flags that say where a set is planned, or how the plan is printed.
ASKED = frozenset(["config", "infernet_config", "gpus", "refresh_hardware", "json"])


NO_FIT = ("set-does-not-fit", "model-does-not-fit")


def main(arguments: PlanArguments, models: ModelSet) -> int:
    """Print the plan of a set; return 3, with the bytes on standard error, if it does not fit."""
    from weft.cli.plan_question import planned_cluster
    from weft.fleet.hosting.catalogue import look_up_entry
    from weft.machine.hardware.host import probe_host

    check_flags(arguments, models.source)
    cluster = planned_cluster(arguments.subject)
    here = arguments.subject.hardware.gpus is None
    try:
        plan = plan_set(models, cluster, look_up_entry, probe_host().memory_free_bytes if here else None)
    except PlanError as error:
        if error.code not in NO_FIT:
            raise
        return fail(str(error), 3)
    if arguments.answer.json:
        print(json.dumps({"source": models.source, "warnings": list(models.warnings), **plan.as_json()}))
        return 0
    print(plan_text(models, plan))
    return 0


def check_flags(arguments: PlanArguments, source: str) -> None:
    """Raise UsageError for a flag of weft plan that is about one model."""
    given = arguments.given_values()
    for flag in (flag for _, group in flag_groups(PlanArguments) for flag in group):
        value = given.get(flag.dest)
        if flag.dest not in ASKED and value not in (None, False, flag.default):
            raise UsageError(
                f"{flag.long} is about one model, and {source} has several; leave it out, or put it into the file",
                code="plan-flag-beside-set",
            )
    if arguments.model:
        raise UsageError(
            f"{source} has several models, and the command line names {arguments.model!r}; leave one of them out",
            code="model-beside-set",
        )


def _table_lines(cells: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def plan_text(models: ModelSet, plan: SetPlan) -> str:
    """The plan as a table, with a line per device and the warnings about the file."""
    head = ("MODEL", "DEVICES", "AWAKE", "ASLEEP", "WAKES IN", "STAYS AWAKE", "PRIORITY")
    sleepless = plan.sleepless
    cells = [head, *(_cells(model, model not in sleepless) for model in plan.models)]
    lines = _table_lines(cells)
    residency = plan.residency()
    lines.append("")
    for device, room in residency.rooms.items():
        pinned = sum(model.need.awake.get(device, 0) for model in plan.models if model.entry.must_be_awake)
        everyone = sum(model.need.awake.get(device, 0) for model in plan.models)
        together = "all models fit together" if everyone <= room else "not all models are awake at once"
        lines.append(f"{device}: {format_bytes(room)} free, {format_bytes(pinned)} always taken; {together}")
    notes = [*models.warnings, *(_sleepless_note(model, plan.rooms[HOST]) for model in sleepless)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _sleepless_note(model: ModelPlan, room: int) -> str:
    need = format_bytes(model.need.asleep[HOST])
    return (
        f"{model.entry.name!r} is unloaded instead of put to sleep, and loaded again: its weights take {need} of the "
        f"host's memory, and {format_bytes(room)} are free"
    )


def _cells(model: ModelPlan, sleeps: bool) -> tuple[str, ...]:
    entry = model.entry
    stays = "always" if entry.must_be_awake else f"{entry.keep_alive_s:g} s"
    awake, asleep = (_sizes(sizes.items()) for sizes in (model.need.awake, model.need.asleep))
    return (
        ", ".join(entry.names),
        ",".join(model.devices),
        awake,
        asleep,
        f"{model.wake_s:.2f} s" if sleeps else "does not sleep",
        stays,
        str(entry.priority),
    )


def _sizes(sizes: Iterable[tuple[str, int]]) -> str:
    """Bytes of one device, or of several with their names."""
    listed = list(sizes)
    if len(listed) == 1:
        return format_bytes(listed[0][1])
    return ", ".join(f"{device} {format_bytes(size)}" for device, size in listed)
