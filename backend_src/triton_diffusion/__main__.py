"""`triton-diffusion`, and `python -m triton_diffusion`; Ctrl-C while the command is being imported is no error."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""The exit code of a shell's command that Ctrl-C ended."""


def main() -> None:
    try:
        from triton_diffusion.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
