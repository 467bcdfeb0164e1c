"""Servers made with the package of OpenEnv: `python openenv_servers.py NAME PORT MAX_SESSIONS`, of echo or counter."""

import sys


def serve_with_package(name: str, port: int, max_sessions: int) -> None:
    """Run an environment in a server of the package."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class TextAction(Action):
        message: str

    class TextObservation(Observation):
        text: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return TextObservation(text=f"Say something, seed {seed}.", reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            return TextObservation(text=action.message, reward=1.0 / (1 + len(action.message)), done=True)

        @property
        def state(self):
            return State()

    class Counter(Environment):
        """Counts the letters of all messages; the third ends the episode."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.steps, self.letters = 0, 0
            return TextObservation(text="Write as many letters as you can.", reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            self.steps += 1
            self.letters += sum(character.isalpha() for character in action.message)
            return TextObservation(text=f"{self.letters} letters", reward=self.letters / 100, done=self.steps == 3)

        @property
        def state(self):
            return State(step_count=self.steps)

    environment = {"echo": Echo, "counter": Counter}[name]
    app = create_fastapi_app(environment, TextAction, TextObservation, max_concurrent_envs=max_sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve_with_package(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
