"""What a starting orchestrator waits for, as the supervisor reads it from `status.json`."""

WAIT = {"who": "orchestrator", "waits_for": "models.teacher at http://h:1", "since_s": 5.0, "deadline_s": 600.0}
