#!/bin/bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
# Reward 1 if what answer.txt says stands in the agent's last reply, whatever its case and
# punctuation.
words() { echo $(tr 'A-Z' 'a-z' <"$1" | tr -cs 'a-z' ' '); }
touch /logs/agent/completion.txt
answer=$(words "$(dirname "$0")/answer.txt")
case " $(words /logs/agent/completion.txt) " in
  *" $answer "*) echo 1 ;;
  *) echo 0 ;;
esac >/logs/verifier/reward.txt
