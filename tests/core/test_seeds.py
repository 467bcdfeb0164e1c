"""Derived seeds, which stored runs depend on."""

from ramify.core.seeds import derive_seed


def test_derived_seeds_never_change():
    assert derive_seed("0:0") == derive_seed(b"0:0") == 642_837_039
    assert derive_seed("0:1") != derive_seed("0:0")
