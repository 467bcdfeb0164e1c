"""Configuration: typed models, filled from defaults, then `@ file.toml` from left to right, then flags.

One idea: all three are layers of one plain table, and everything is judged once, when the table is complete. So a flag
reaches whatever a file reaches (entries of lists, variants, plugin tables), and one message lists every problem.
"""

from ramify.config.base import Config, RunName
from ramify.config.entry import check, parse, refuse, switch
from ramify.config.output import dry_run, dump, write
from ramify.config.part import parse_part

__all__ = ["Config", "RunName", "check", "dry_run", "dump", "parse", "parse_part", "refuse", "switch", "write"]
