"""Background tasks of an orchestrator."""
