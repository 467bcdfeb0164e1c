"""What every other room uses: failures, configuration, files, timeouts, and what a command shows in a terminal."""

from ramify.core import errors as errors
