"""The correct modules of the `repair` tasks. Ramify reads them as text; it never imports them."""
