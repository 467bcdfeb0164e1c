"""A list of tickets: people of a team work on them."""

import random
from typing import Any, Literal

from pydantic import BaseModel

from ramify.env.tasksets.general_agent.world import (
    ActionRefused,
    Person,
    World,
    WorldGoal,
    draw_people,
    find_by_name,
    get_row,
    make_call,
    make_goal,
)

SUBJECTS = (
    "printer",
    "login",
    "search",
    "report",
    "invoice",
    "calendar",
    "camera",
    "backup",
    "projector",
    "newsletter",
)
FAULTS = ("is slow", "does not start", "shows nothing", "asks twice", "is too loud", "forgets its settings")

Status = Literal["open", "working", "closed"]


class Ticket(BaseModel):
    """A ticket; `owner` is the key of a person."""

    title: str
    urgency: int
    status: Status
    owner: str | None


class Tickets(World):
    """People and tickets; a ticket without an owner waits for one."""

    people: dict[str, Person]
    tickets: dict[str, Ticket]

    @classmethod
    def generate(cls, rng: random.Random, size: int) -> "Tickets":
        """Return a team with `size` tickets."""
        team = {f"U{n}": Person(name=name) for n, name in enumerate(draw_people(rng, max(2, size // 2)))}
        titles = rng.sample([f"{thing} {fault}" for thing in SUBJECTS for fault in FAULTS], size)
        urgencies = rng.sample(range(1, 10 * size), size)  # all different: one ticket is the most urgent
        tickets: dict[str, Ticket] = {}
        for number, (title, urgency) in enumerate(zip(titles, urgencies)):
            owner = rng.choice([None, *team])
            status: Status = "open" if owner is None else rng.choice(("working", "working", "closed"))
            tickets[f"T{number}"] = Ticket(title=title, urgency=urgency, status=status, owner=owner)
        return cls(people=team, tickets=tickets)

    def find_person(self, name: str) -> dict[str, Any]:
        """Find a person by name."""
        return {"person_id": find_by_name(self.people, name, "person")}

    def list_tickets(self, status: Status) -> dict[str, Any]:
        """The tickets that are open, working or closed."""
        tickets = {id: ticket for id, ticket in self.tickets.items() if ticket.status == status}
        return {id: ticket.model_dump(exclude={"status"}) for id, ticket in tickets.items()}

    def assign_ticket(self, ticket_id: str, person_id: str) -> str:
        """Give a ticket that is not closed to a person, who works on it from now on."""
        ticket = get_row(self.tickets, ticket_id, "ticket")
        get_row(self.people, person_id, "person")
        if ticket.status == "closed":
            raise ActionRefused(f"ticket {ticket_id} is closed")
        ticket.owner, ticket.status = person_id, "working"
        return "assigned"

    def close_ticket(self, ticket_id: str) -> str:
        """Close a ticket."""
        ticket = get_row(self.tickets, ticket_id, "ticket")
        if ticket.status == "closed":
            raise ActionRefused(f"ticket {ticket_id} is closed already")
        ticket.status = "closed"
        return "closed"

    def reopen_ticket(self, ticket_id: str) -> str:
        """Open a closed ticket again, without an owner."""
        ticket = get_row(self.tickets, ticket_id, "ticket")
        if ticket.status != "closed":
            raise ActionRefused(f"ticket {ticket_id} is not closed")
        ticket.status, ticket.owner = "open", None
        return "open"

    def make_assignment_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to assign the most urgent open ticket."""
        open_tickets = [id for id, ticket in self.tickets.items() if ticket.status == "open"]
        if not open_tickets:
            return None
        id = max(open_tickets, key=lambda id: self.tickets[id].urgency)
        person = rng.choice(list(self.people))
        name = self.people[person].name
        return make_goal(
            f"Give the most urgent open ticket to {name}.",
            make_call("find_person", name=name),
            make_call("list_tickets", status="open"),
            make_call("assign_ticket", ticket_id=id, person_id=person),
        )

    def make_handover_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to assign all tickets of one person to another."""
        giver, taker = rng.sample(list(self.people), 2)
        tickets_in_work = self._find_tickets_in_work(giver)
        if not tickets_in_work:
            return None
        return make_goal(
            f"{self.people[taker].name} takes over all tickets that {self.people[giver].name} is working on.",
            make_call("find_person", name=self.people[giver].name),
            make_call("find_person", name=self.people[taker].name),
            make_call("list_tickets", status="working"),
            *(make_call("assign_ticket", ticket_id=id, person_id=taker) for id in tickets_in_work),
        )

    def make_closing_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to close all tickets of a person."""
        person = rng.choice(list(self.people))
        tickets_in_work = self._find_tickets_in_work(person)
        if not tickets_in_work:
            return None
        return make_goal(
            f"Close every ticket that {self.people[person].name} is working on.",
            make_call("find_person", name=self.people[person].name),
            make_call("list_tickets", status="working"),
            *(make_call("close_ticket", ticket_id=id) for id in tickets_in_work),
        )

    def make_reopening_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to reopen a ticket."""
        closed_tickets = [id for id, ticket in self.tickets.items() if ticket.status == "closed"]
        if not closed_tickets:
            return None
        id = rng.choice(closed_tickets)
        return make_goal(
            f"Open the ticket {self.tickets[id].title!r} again.",
            make_call("list_tickets", status="closed"),
            make_call("reopen_ticket", ticket_id=id),
        )

    tool_names = ("find_person", "list_tickets", "assign_ticket", "close_ticket", "reopen_ticket")
    goal_makers = (make_assignment_goal, make_handover_goal, make_closing_goal, make_reopening_goal)

    def _find_tickets_in_work(self, person: str) -> list[str]:
        return [id for id, ticket in self.tickets.items() if (ticket.status, ticket.owner) == ("working", person)]
