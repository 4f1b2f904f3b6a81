#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# TextArena: max_turns=3 gives four turns, a lost game has a reward of 0.95, and reset(seed) sets
# Python's global random, so that two games in one process change each other's results.
#
# Version: textarena 0.7.4, its GuessTheNumber, Mastermind and Blackjack.
# Guess: "within 3 turns", as the prompt says, is three turns. A game that is not won has a reward
#   of 0 or a small one. A seed belongs to its game: the same seed and the same actions give the
#   same game, and the caller's random numbers are not affected.
# Behaviour: the limit is checked before the turn is counted, so there is one turn more, in each
#   game that uses check_turn_limit, and a win in it counts. A game that reached the limit has the
#   closeness of the last guess as its reward: 0.95 for a number next to the target, where 1 is a
#   win. Cards are drawn from the global generator, so a step of another game between two steps
#   changes the cards. After reset(seed=0), random.random() is always the same number.
# Why it matters: halving the range is rewarded nearly as much as finding the number, and a success
#   rate of rewards over 0.5 counts lost games. Rollouts that run side by side cannot be repeated,
#   and a trainer that shuffles or samples with random repeats itself after each reset.
# Source: check_turn_limit of textarena/core.py, SinglePlayerState.step of state.py,
#   _get_percentage_completion of envs/GuessTheNumber/env.py, and State.__init__, which calls
#   random.seed.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv textarena==0.7.4

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import random

from textarena.envs.Blackjack.env import BlackjackEnv
from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv
from textarena.envs.Mastermind.env import MastermindEnv


def play(game, moves):
    """Plays until the game ends and returns the number of moves and the reward."""
    for count, move in enumerate(moves, 1):
        done, _ = game.step(f"[{move}]")
        if done:
            break
    return f"{count} moves, reward {game.close()[0][0]:.2f}"


def guesses(order):
    game = GuessTheNumberEnv(max_turns=3)
    game.reset(num_players=1, seed=0)
    target = game.game_number
    wrong = [number for number in range(1, 21) if number != target]
    return play(game, order(target, wrong))


print("GuessTheNumber with max_turns=3")
print("  wrong guesses:", guesses(lambda target, wrong: wrong))
near = lambda target, wrong: sorted(wrong, key=lambda number: -abs(number - target))[-4:]
print("  wrong guesses that come nearer:", guesses(near))
print("  right in the fourth:", guesses(lambda target, wrong: [*wrong[:3], target]))
game = MastermindEnv(max_turns=3)
game.reset(num_players=1, seed=0)
print("Mastermind with max_turns=3:", play(game, ["1 2 3 4", "1 2 4 3", "1 3 2 4", "1 4 3 2"]))


def results(other):
    """Returns the results of five hands of Blackjack, if the other game moves in between."""
    game = BlackjackEnv(num_hands=5)
    game.reset(num_players=1, seed=1)
    for _ in range(5):
        other()
        game.step("[stand]")
    return game.state.game_state["results_summary"]


second = BlackjackEnv(num_hands=50)
second.reset(num_players=1, seed=2)
print("Blackjack with seed 1, alone:", results(lambda: None))
print("Blackjack with seed 1, side by side:", results(lambda: second.step("[stand]")))
numbers = []
for _ in range(3):
    game.reset(num_players=1, seed=0)
    numbers.append(f"{random.random():.4f}")
print("random.random() after each reset(seed=0):", *numbers)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
GuessTheNumber with max_turns=3
  wrong guesses: 4 moves, reward 0.53
  wrong guesses that come nearer: 4 moves, reward 0.95
  right in the fourth: 4 moves, reward 1.00
Mastermind with max_turns=3: 4 moves, reward 0.50
Blackjack with seed 1, alone: {'win': 0, 'lose': 5, 'draw': 0}
Blackjack with seed 1, side by side: {'win': 1, 'lose': 4, 'draw': 0}
random.random() after each reset(seed=0): 0.9655 0.9655 0.9655
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
