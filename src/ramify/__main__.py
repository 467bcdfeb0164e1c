"""`python -m ramify` is the `ramify` command."""

from ramify.cli import main
from ramify.processes.exit import QUICK_EXIT

if __name__ == "__main__":
    QUICK_EXIT.register()
    QUICK_EXIT.exit(main())
