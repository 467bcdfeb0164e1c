"""Judges: models that score replies.

One idea: a verdict is a JSON object, and each reply of the model is paid for once. The model may repair a verdict that
cannot be read; after that it is a failure, never a score of 0, because a policy must not be trained on a judge's
formatting errors.
"""
