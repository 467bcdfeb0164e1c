#!/bin/bash
set -e
cd data
for file in *.txt; do
  echo "$file $(wc -l < "$file")"
done > ../counts.txt
