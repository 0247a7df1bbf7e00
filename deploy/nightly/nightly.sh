#!/usr/bin/env bash
# The nightly accuracy gate on this host: deploy/nightly/nightly.sh MODEL_FOLDER [OUTPUT_FOLDER] [more options]
#
# Gates MODEL_FOLDER (Nemotron Nano 9B v2, or any model the native engine takes) with extra_buffer and without, cold and
# warm, each paired with a unified node. Exit status: 0 pass, 1 fail, 2 invalid. Everything about the night is in
# OUTPUT_FOLDER/DATE, past nights in OUTPUT_FOLDER/history. For another device, task or size add options of
# `tandem gate nightly`; options of the nodes are in NODE_OPTIONS.
set -euo pipefail

if [ $# -lt 1 ]; then
	echo "usage: $0 MODEL_FOLDER [OUTPUT_FOLDER] [options of tandem gate nightly]" >&2
	exit 2
fi
model=$1
output=${2:-nights}
shift $(($# < 2 ? 1 : 2))

tandem=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/tandem
[ -x "$tandem" ] || tandem=$(command -v tandem) || { echo "$0: no tandem: run make first" >&2; exit 2; }

# One GPU of 140 GB: three nodes share it, each with its own copy of the weights (18 GB) and 16 GB of states.
node_options=${NODE_OPTIONS-"--device cuda --dtype bfloat16 --max-total-tokens 147456 --max-mamba-cache-size 112 \
--max-running-requests 96"}
arguments=()
for word in $node_options; do arguments+=("--node-option=$word"); done

exec "$tandem" gate nightly --model-path "$model" "${arguments[@]}" \
	--output "$output/$(date -u +%Y-%m-%dT%H%M%SZ)" --history "$output/history" "$@"
