"""Steps that exports of one model and of a set share: the model of a node's configuration, and the files written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.flags.plan_flags import Export, PlanArguments
from weft.cli.parser import UsageError

if TYPE_CHECKING:
    from weft.study.export.files import ExportFile
    from weft.study.export.infernet_config import NodeConfig


def output_files(flags: Export, texts: Sequence[ExportFile]) -> int:
    """Write the files to the folder of --emit-to, or print them; return the exit status."""
    from weft.study.export import files

    if flags.emit_to is None:
        sys.stdout.write(files.joined_text(texts))
        return 0
    for written in files.write_files(texts, Path(flags.emit_to).expanduser(), force=flags.force):
        print(f"wrote {written}", file=sys.stderr)
    return 0


def name_configured_model(arguments: PlanArguments, config: NodeConfig) -> PlanArguments:
    """The arguments with the model of a node's configuration, unless it is given."""
    from weft.study.export import infernet_config

    if arguments.model:
        return arguments
    if not config.instances:
        path = arguments.export.infernet_config
        raise UsageError(f"which model? Give MODEL, since {path} names none", code="model-missing")
    return arguments.with_model(infernet_config.model_of_tag(config.instances[0].model))
