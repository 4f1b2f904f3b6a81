#!/bin/bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
# Reward 1 if the agent's last reply says what answer.txt says, whatever its case and punctuation.
letters() { tr 'A-Z' 'a-z' <"$1" | tr -cd 'a-z'; }
touch /logs/agent/completion.txt
if [ "$(letters /logs/agent/completion.txt)" = "$(letters "$(dirname "$0")/answer.txt")" ]; then echo 1; else echo 0; fi \
  >/logs/verifier/reward.txt
