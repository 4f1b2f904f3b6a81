#!/bin/bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
# Pays for parts of the way: 0.2 if a command was run, 0.6 if the file is there, 1 if it says hello.
file=/app/greeting.txt
reward=0
# The output of a script begins so. In what a model said the quotes are escaped.
if grep -qs '"content":"Exit code: ' /logs/agent/trajectory.json; then reward=0.2; fi
if [ -f $file ]; then reward=0.6; fi
if [ -f $file ] && grep -qx hello $file; then reward=1; fi
echo $reward >/logs/verifier/reward.txt
