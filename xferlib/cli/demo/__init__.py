"""The demo: real pictures through host -> device -> host, all stages overlapped, with proof.

`command` is the order of events; every other module is one thing that it uses.
"""

from __future__ import annotations

from xferlib.cli.demo.command import run as run
from xferlib.cli.demo.options import Options as Options
