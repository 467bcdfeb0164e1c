"""A hotel: guests stay in rooms, night by night."""

import random
from typing import Any

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

NIGHTS = range(1, 8)


class Room(BaseModel):
    """A room and its price per night."""

    beds: int
    price: int


class Stay(BaseModel):
    """A stay of one night; `guest` and `room` are keys."""

    guest: str
    room: str
    night: int


class Hotel(World):
    """Rooms, guests, and stays of one night, keyed by room and night."""

    rooms: dict[str, Room]
    guests: dict[str, Person]
    stays: dict[str, Stay]

    @classmethod
    def generate(cls, rng: random.Random, size: int) -> "Hotel":
        """Return a hotel with `size` rooms, and guests and stays."""
        prices = rng.sample(range(40, 40 + 5 * size), size)  # all different: one free room is the cheapest
        rooms = {str(101 + n): Room(beds=rng.randint(1, 3), price=price) for n, price in enumerate(prices)}
        guests = {f"G{n}": Person(name=name) for n, name in enumerate(draw_people(rng, size))}
        hotel = cls(rooms=rooms, guests=guests, stays={})
        for _ in range(size):
            guest, room, night = rng.choice(list(guests)), rng.choice(list(rooms)), rng.choice(NIGHTS)
            if f"{room}-{night}" not in hotel.stays and hotel._find_stay(guest, night) is None:
                hotel.book_room(guest, room, night)
        return hotel

    def find_guest(self, name: str) -> dict[str, Any]:
        """Find a guest by name."""
        return {"guest_id": find_by_name(self.guests, name, "guest")}

    def free_rooms(self, night: int) -> dict[str, Any]:
        """The rooms that are free on a night, with beds and price."""
        return {id: room.model_dump() for id, room in self.rooms.items() if f"{id}-{night}" not in self.stays}

    def list_stays(self, guest_id: str) -> dict[str, Any]:
        """The stays of a guest."""
        get_row(self.guests, guest_id, "guest")
        return {id: stay.model_dump() for id, stay in self.stays.items() if stay.guest == guest_id}

    def book_room(self, guest_id: str, room: str, night: int) -> str:
        """Book a free room for a guest and a night."""
        get_row(self.guests, guest_id, "guest")
        get_row(self.rooms, room, "room")
        if night not in NIGHTS:
            raise ActionRefused(f"night goes from {NIGHTS[0]} to {NIGHTS[-1]}")
        id = f"{room}-{night}"
        if id in self.stays:
            raise ActionRefused(f"room {room} is taken on night {night}")
        self.stays[id] = Stay(guest=guest_id, room=room, night=night)
        return f"booked: {id}"

    def cancel_stay(self, stay_id: str) -> str:
        """Cancel a stay."""
        get_row(self.stays, stay_id, "stay")
        del self.stays[stay_id]
        return "cancelled"

    def move_stay(self, stay_id: str, room: str) -> str:
        """Move a stay to another room that is free on that night."""
        stay = get_row(self.stays, stay_id, "stay")
        booked = self.book_room(stay.guest, room, stay.night)
        del self.stays[stay_id]
        return booked

    def make_booking_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to book the cheapest free room with a number of beds."""
        guest, night, beds = rng.choice(list(self.guests)), rng.choice(NIGHTS), rng.randint(1, 3)
        free = [id for id, room in self.free_rooms(night).items() if room["beds"] == beds]
        if not free or self._find_stay(guest, night) is not None:
            return None
        room = min(free, key=lambda id: self.rooms[id].price)
        size = f"{beds} beds" if beds > 1 else "1 bed"
        return make_goal(
            f"Book the cheapest free room with {size} for {self.guests[guest].name} on night {night}.",
            make_call("find_guest", name=self.guests[guest].name),
            make_call("free_rooms", night=night),
            make_call("book_room", guest_id=guest, room=room, night=night),
        )

    def make_cancellation_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to cancel a stay."""
        if not self.stays:
            return None
        id = rng.choice(list(self.stays))
        stay = self.stays[id]
        name = self.guests[stay.guest].name
        return make_goal(
            f"Cancel the stay of {name} on night {stay.night}.",
            make_call("find_guest", name=name),
            make_call("list_stays", guest_id=stay.guest),
            make_call("cancel_stay", stay_id=id),
        )

    def make_move_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to move a stay to another free room."""
        if not self.stays:
            return None
        id = rng.choice(list(self.stays))
        stay = self.stays[id]
        free = list(self.free_rooms(stay.night))
        if not free:
            return None
        room = rng.choice(free)
        name = self.guests[stay.guest].name
        return make_goal(
            f"Move {name} to room {room} on night {stay.night}.",
            make_call("find_guest", name=name),
            make_call("list_stays", guest_id=stay.guest),
            make_call("move_stay", stay_id=id, room=room),
        )

    tool_names = ("find_guest", "free_rooms", "list_stays", "book_room", "cancel_stay", "move_stay")
    goal_makers = (make_booking_goal, make_cancellation_goal, make_move_goal)

    def _find_stay(self, guest: str, night: int) -> str | None:
        """Return the stay of a guest on a night; a generated world has at most one."""
        return next((id for id, stay in self.stays.items() if (stay.guest, stay.night) == (guest, night)), None)
