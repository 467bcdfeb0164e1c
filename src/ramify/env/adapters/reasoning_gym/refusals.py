"""The datasets of reasoning-gym 0.1.25 that cannot be trained on, with the reason.

`make test-envs` checks the list: every other dataset scores its own answers with more than 0, and does not raise on
replies that make no sense or give them the full score.
"""

NO_ANSWER = "its entries have no answer, so its scorer cannot be validated"

REFUSALS = {
    "boxnet": NO_ANSWER,
    "coin_flip": "its scorer gives the full score to every prefix of the answer, such as 0",
    "composite": "it is a mixture of other datasets; use one source for each of them",
    "game_of_life": "its scorer raises on replies that are JSON but no board",
    "game_of_life_halting": "its scorer gives the full score to every reply that is not empty",
    "graph_color": NO_ANSWER,
    "prime_factorization": "its scorer raises on replies that are no product of integers",
    "propositional_logic": NO_ANSWER,
    "rubiks_cube": NO_ANSWER,
    "rush_hour": NO_ANSWER,
}
