#!/bin/bash
# The expected file is only here.
if diff -q /tests/expected.txt counts.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
