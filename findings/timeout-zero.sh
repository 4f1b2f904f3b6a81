#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# coreutils of small images: `timeout 0` has three meanings, and a fraction of a second two.
#
# Versions: GNU timeout of this machine (seen with 9.1); Debian 12's busybox-static 1.35.0, toybox
#   0.8.9 and rust-coreutils 0.0.17 (uutils), fetched with apt-get, which may need `apt-get update`
#   before.
# Guess: `timeout 0 COMMAND` sets no limit, as GNU documents it, in all of them. A fraction is
#   exact, or an error in the smallest of them.
# Behaviour: GNU and uutils set no limit. busybox ends the command after a second, with 143. toybox
#   answers 124, "timed out": in some runs it kills the command at once, in others it waits for the
#   command's own end, and answers 124 all the same. busybox takes 0.3 without a complaint and makes
#   it one second.
# Why it matters: a runner that gives each command what is left of the time, rounded down, gives 0
#   at some point. The same command then has no limit, a second, or no chance and a wrong exit code,
#   by the image that the task happens to use.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get download -qq busybox-static toybox rust-coreutils 2>errors.log ||
  { cat errors.log; exit 1; }
for package in *.deb; do dpkg -x "$package" .; done

# run TIMEOUT LIMIT: the exit code of a command of 2.2 seconds, and how long it took.
run() {
  local start=$EPOCHREALTIME code=0
  $1 "$2" sleep 2.2 2>errors.log || code=$?
  awk -v "start=$start" -v "end=$EPOCHREALTIME" -v "head=$1 $2 sleep 2.2: exit $code" 'BEGIN {
    seconds = end - start
    if (head ~ /toybox timeout 0 /) print head
    else print head (seconds < 2.2 ? sprintf(" after %.0f s", seconds) : " at its own end")
  }'
}
seen=$(
  for program in timeout "usr/bin/coreutils timeout" "bin/busybox timeout" "bin/toybox timeout"; do
    run "$program" 0
    run "$program" 0.3
  done
)
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
timeout 0 sleep 2.2: exit 0 at its own end
timeout 0.3 sleep 2.2: exit 124 after 0 s
usr/bin/coreutils timeout 0 sleep 2.2: exit 0 at its own end
usr/bin/coreutils timeout 0.3 sleep 2.2: exit 124 after 0 s
bin/busybox timeout 0 sleep 2.2: exit 143 after 1 s
bin/busybox timeout 0.3 sleep 2.2: exit 143 after 1 s
bin/toybox timeout 0 sleep 2.2: exit 124
bin/toybox timeout 0.3 sleep 2.2: exit 124 after 0 s
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
