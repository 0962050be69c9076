"""Join the pieces of the wheels beside this file, verify them, and install them: `python3 install.py TARGET`."""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(target: str) -> None:
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        wheels = [join(row, here, Path(folder)) for row in json.loads((here / "manifest.json").read_text())]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        # Bytecode of thousands of files would take minutes.
        if subprocess.run([*pip, "--no-compile", "--target", target, *wheels]).returncode:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            sys.exit(f"install.py: pip failed; if it takes none of these wheels, download them with --python {version}")
    print(f"{len(wheels)} packages in {target}: PYTHONPATH={Path(target).resolve()}")


def join(row: dict[str, Any], here: Path, folder: Path) -> str:
    """Path of the whole wheel. Ends the program if a piece is missing or damaged."""
    path = folder / row["wheel"]
    whole = hashlib.sha256()
    with path.open("wb") as wheel:
        for piece in row["pieces"]:
            source = here / piece["file"]
            if not source.is_file():
                sys.exit(f"install.py: {source} is missing; copy it again")
            data = source.read_bytes()
            if hashlib.sha256(data).hexdigest() != piece["sha256"]:
                sys.exit(f"install.py: {source} is damaged; copy it again")
            whole.update(data)
            wheel.write(data)
    if whole.hexdigest() != row["sha256"]:
        sys.exit(f"install.py: {row['wheel']} is not what was downloaded; download it again")
    return str(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python3 install.py TARGET")
    main(sys.argv[1])
