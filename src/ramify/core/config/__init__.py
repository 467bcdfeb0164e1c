"""Configuration: typed models, filled from defaults, then `@ file.toml` from left to right, then flags.

One idea: all three are layers of one plain table, which is validated once, when it is complete. So a flag can set
whatever a file can set (entries of lists, variants, plugin tables), and one error lists all wrong keys and values.
"""

from ramify.core.config.base import Config, HttpAddress, RunName, TcpAddress, expand_model_name, get_explicit_values
from ramify.core.config.dump import dry_run, dump_toml, write_toml
from ramify.core.config.layers import COMMAND_HINTS, LOSS_HINTS, find_file_hint
from ramify.core.config.parser import (
    add_origins,
    parse,
    parse_component,
    parse_section,
    pop_flags,
    read_stored_config,
    read_top_level_keys,
)

__all__ = [
    "COMMAND_HINTS",
    "LOSS_HINTS",
    "Config",
    "HttpAddress",
    "RunName",
    "TcpAddress",
    "add_origins",
    "dry_run",
    "dump_toml",
    "expand_model_name",
    "find_file_hint",
    "get_explicit_values",
    "parse",
    "parse_component",
    "parse_section",
    "pop_flags",
    "read_stored_config",
    "read_top_level_keys",
    "write_toml",
]
