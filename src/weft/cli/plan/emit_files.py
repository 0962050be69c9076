"""Steps that exports of one model and of a set share: the model of a node's configuration, and the files written."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.parser import UsageError

if TYPE_CHECKING:
    from weft.study.export.files import ExportFile
    from weft.study.export.infernet_config import NodeConfig


def output_files(arguments: Namespace, texts: Sequence[ExportFile]) -> int:
    """Write the files to the folder of --emit-to, or print them; return the exit status."""
    from weft.study.export import files

    folder = getattr(arguments, "emit_to", None)
    if folder is None:
        sys.stdout.write(files.joined_text(texts))
        return 0
    for written in files.write_files(texts, Path(folder).expanduser(), force=getattr(arguments, "force", False)):
        print(f"wrote {written}", file=sys.stderr)
    return 0


def name_configured_model(arguments: Namespace, config: NodeConfig) -> None:
    """Set `arguments.model` to the model of a node's configuration, unless it is given."""
    from weft.study.export import infernet_config

    if getattr(arguments, "model", ""):
        return
    if not config.instances:
        raise UsageError(f"which model? Give MODEL, since {arguments.infernet_config} names none", code="model-missing")
    arguments.model = infernet_config.model_of_tag(config.instances[0].model)
