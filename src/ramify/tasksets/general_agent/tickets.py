"""A list of tickets: people of a team work on them."""

import random
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from ramify.tasksets.general_agent.world import Goal, Refused, World, call, named, people, row

THINGS = ("printer", "login", "search", "report", "invoice", "calendar", "camera", "backup", "projector", "newsletter")
FAULTS = ("is slow", "does not start", "shows nothing", "asks twice", "is too loud", "forgets its settings")

Status = Literal["open", "working", "closed"]


class Person(BaseModel):
    name: str


class Ticket(BaseModel):
    title: str
    urgency: int
    status: Status
    owner: str | None


class Tickets(World):
    """People and tickets; a ticket without an owner waits for one."""

    people: dict[str, Person]
    tickets: dict[str, Ticket]

    @classmethod
    def make(cls, rng: random.Random, size: int) -> "Tickets":
        team = {f"U{n}": Person(name=name) for n, name in enumerate(people(rng, max(2, size // 2)))}
        titles = rng.sample([f"{thing} {fault}" for thing in THINGS for fault in FAULTS], size)
        urgencies = rng.sample(range(1, 10 * size), size)  # all different: one ticket is the most urgent
        tickets: dict[str, Ticket] = {}
        for number, (title, urgency) in enumerate(zip(titles, urgencies)):
            owner = rng.choice([None, *team])
            status: Status = "open" if owner is None else rng.choice(("working", "working", "closed"))
            tickets[f"T{number}"] = Ticket(title=title, urgency=urgency, status=status, owner=owner)
        return cls(people=team, tickets=tickets)

    def tools(self) -> list[Callable[..., Any]]:
        return [self.find_person, self.list_tickets, self.assign_ticket, self.close_ticket, self.reopen_ticket]

    def find_person(self, name: str) -> dict[str, Any]:
        """Find a person by name."""
        return {"person_id": named(self.people, name, "person")}

    def list_tickets(self, status: Status) -> dict[str, Any]:
        """The tickets that are open, working or closed."""
        found = {id: ticket for id, ticket in self.tickets.items() if ticket.status == status}
        return {id: ticket.model_dump(exclude={"status"}) for id, ticket in found.items()}

    def assign_ticket(self, ticket_id: str, person_id: str) -> str:
        """Give a ticket that is not closed to a person, who works on it from now on."""
        ticket = row(self.tickets, ticket_id, "ticket")
        row(self.people, person_id, "person")
        if ticket.status == "closed":
            raise Refused(f"ticket {ticket_id} is closed")
        ticket.owner, ticket.status = person_id, "working"
        return "assigned"

    def close_ticket(self, ticket_id: str) -> str:
        """Close a ticket."""
        ticket = row(self.tickets, ticket_id, "ticket")
        if ticket.status == "closed":
            raise Refused(f"ticket {ticket_id} is closed already")
        ticket.status = "closed"
        return "closed"

    def reopen_ticket(self, ticket_id: str) -> str:
        """Open a closed ticket again, without an owner."""
        ticket = row(self.tickets, ticket_id, "ticket")
        if ticket.status != "closed":
            raise Refused(f"ticket {ticket_id} is not closed")
        ticket.status, ticket.owner = "open", None
        return "open"

    def assigning(self, rng: random.Random) -> Goal | None:
        waiting = [id for id, ticket in self.tickets.items() if ticket.status == "open"]
        if not waiting:
            return None
        id = max(waiting, key=lambda id: self.tickets[id].urgency)
        person = rng.choice(list(self.people))
        name = self.people[person].name
        return Goal(
            f"Give the most urgent open ticket to {name}.",
            (
                call("find_person", name=name),
                call("list_tickets", status="open"),
                call("assign_ticket", ticket_id=id, person_id=person),
            ),
        )

    def handing_over(self, rng: random.Random) -> Goal | None:
        giver, taker = rng.sample(list(self.people), 2)
        running = self._of(giver)
        if not running:
            return None
        return Goal(
            f"{self.people[taker].name} takes over all tickets that {self.people[giver].name} is working on.",
            (
                call("find_person", name=self.people[giver].name),
                call("find_person", name=self.people[taker].name),
                call("list_tickets", status="working"),
                *(call("assign_ticket", ticket_id=id, person_id=taker) for id in running),
            ),
        )

    def closing(self, rng: random.Random) -> Goal | None:
        person = rng.choice(list(self.people))
        running = self._of(person)
        if not running:
            return None
        return Goal(
            f"Close every ticket that {self.people[person].name} is working on.",
            (
                call("find_person", name=self.people[person].name),
                call("list_tickets", status="working"),
                *(call("close_ticket", ticket_id=id) for id in running),
            ),
        )

    def reopening(self, rng: random.Random) -> Goal | None:
        done = [id for id, ticket in self.tickets.items() if ticket.status == "closed"]
        if not done:
            return None
        id = rng.choice(done)
        return Goal(
            f"Open the ticket {self.tickets[id].title!r} again.",
            (call("list_tickets", status="closed"), call("reopen_ticket", ticket_id=id)),
        )

    goals = (assigning, handing_over, closing, reopening)

    def _of(self, person: str) -> list[str]:
        return [id for id, ticket in self.tickets.items() if (ticket.status, ticket.owner) == ("working", person)]
