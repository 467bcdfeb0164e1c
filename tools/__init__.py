"""Programs for people who work on Ramify itself; they are not part of the installed package."""
