"""A library: members borrow books."""

import random
from typing import Any

from pydantic import BaseModel

from ramify.env.tasksets.general_agent.world import (
    ActionRefused,
    World,
    WorldGoal,
    draw_people,
    find_by_name,
    get_row,
    make_call,
    make_goal,
)

TITLE_NOUNS = ("history", "secret", "garden", "letters", "shadow", "island", "winter", "journey")
TITLE_TOPICS = ("rivers", "bread", "stars", "clocks", "bridges", "birds", "silence", "gold", "maps", "rain")
LOAN_DAYS = 14  # duration of a loan and of a renewal


class Book(BaseModel):
    """A book; `copies` are on the shelf."""

    name: str
    copies: int


class LibraryMember(BaseModel):
    """A member, with the fine that is due."""

    name: str
    fine: int


class Loan(BaseModel):
    """A loan, due in `due` days; `member` and `book` are keys."""

    member: str
    book: str
    due: int


class Library(World):
    """Books, members, and loans, keyed by member and book. Days are counted from today, which is 0."""

    books: dict[str, Book]
    members: dict[str, LibraryMember]
    loans: dict[str, Loan]

    @classmethod
    def generate(cls, rng: random.Random, size: int) -> "Library":
        """Return a library with `size` books, and members and loans."""
        titles = rng.sample(
            [f"The {kind} of {matter}".title() for kind in TITLE_NOUNS for matter in TITLE_TOPICS], size
        )
        books = {f"B{n}": Book(name=title, copies=rng.randint(0, 3)) for n, title in enumerate(titles)}
        names = draw_people(rng, size)
        members = {f"M{n}": LibraryMember(name=name, fine=rng.choice([0, 0, 2, 5])) for n, name in enumerate(names)}
        loans: dict[str, Loan] = {}
        for _ in range(size):
            member, book = rng.choice(list(members)), rng.choice(list(books))
            loans[f"{member}{book}"] = Loan(member=member, book=book, due=rng.randint(1, LOAN_DAYS))
        return cls(books=books, members=members, loans=loans)

    def find_member(self, name: str) -> dict[str, Any]:
        """Find a member by name."""
        id = find_by_name(self.members, name, "member")
        return {"member_id": id, **self.members[id].model_dump()}

    def find_book(self, title: str) -> dict[str, Any]:
        """Find a book by title."""
        id = find_by_name(self.books, title, "book")
        return {"book_id": id, **self.books[id].model_dump()}

    def list_loans(self, member_id: str) -> dict[str, Any]:
        """The books that a member has, with the day they are due."""
        get_row(self.members, member_id, "member")
        loans = [loan for loan in self.loans.values() if loan.member == member_id]
        return {loan.book: {"title": self.books[loan.book].name, "due": loan.due} for loan in loans}

    def lend_book(self, member_id: str, book_id: str) -> str:
        """Lend a book to a member who owes no fine."""
        member, book = get_row(self.members, member_id, "member"), get_row(self.books, book_id, "book")
        if member.fine:
            raise ActionRefused(f"{member.name} has to pay a fine of {member.fine} first")
        if not book.copies:
            raise ActionRefused(f"no copy of {book.name} is left")
        if f"{member_id}{book_id}" in self.loans:
            raise ActionRefused(f"{member.name} has {book.name} already")
        book.copies -= 1
        self.loans[f"{member_id}{book_id}"] = Loan(member=member_id, book=book_id, due=LOAN_DAYS)
        return f"lent, due in {LOAN_DAYS} days"

    def return_book(self, member_id: str, book_id: str) -> str:
        """Take back a book from a member."""
        loan = self._get_loan(member_id, book_id)
        self.books[loan.book].copies += 1
        del self.loans[f"{member_id}{book_id}"]
        return "returned"

    def renew_loan(self, member_id: str, book_id: str) -> str:
        """Give a member 14 more days with a book."""
        loan = self._get_loan(member_id, book_id)
        loan.due += LOAN_DAYS
        return f"due in {loan.due} days"

    def pay_fine(self, member_id: str) -> str:
        """Take the payment of a member's fine."""
        member = get_row(self.members, member_id, "member")
        if not member.fine:
            raise ActionRefused(f"{member.name} owes nothing")
        member.fine = 0
        return "paid"

    def make_loan_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to lend a book, after a fine is paid."""
        member, book = rng.choice(list(self.members)), rng.choice(list(self.books))
        if not self.books[book].copies or f"{member}{book}" in self.loans:
            return None
        name, title = self.members[member].name, self.books[book].name
        fine = self.members[member].fine
        return make_goal(
            f"Lend {title} to {name}" + (", who has come to pay the fine too." if fine else "."),
            make_call("find_member", name=name),
            make_call("find_book", title=title),
            *([make_call("pay_fine", member_id=member)] if fine else []),
            make_call("lend_book", member_id=member, book_id=book),
        )

    def make_return_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to take back all books of a member."""
        if not self.loans:
            return None
        member = self.loans[rng.choice(list(self.loans))].member
        name = self.members[member].name
        books = [loan.book for loan in self.loans.values() if loan.member == member]
        return make_goal(
            f"{name} brings back every book that is out on that name.",
            make_call("find_member", name=name),
            make_call("list_loans", member_id=member),
            *(make_call("return_book", member_id=member, book_id=book) for book in books),
        )

    def make_renewal_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to renew a loan."""
        if not self.loans:
            return None
        loan = self.loans[rng.choice(list(self.loans))]
        name, title = self.members[loan.member].name, self.books[loan.book].name
        return make_goal(
            f"Renew the loan of {title} for {name}.",
            make_call("find_member", name=name),
            make_call("list_loans", member_id=loan.member),
            make_call("renew_loan", member_id=loan.member, book_id=loan.book),
        )

    tool_names = ("find_member", "find_book", "list_loans", "lend_book", "return_book", "renew_loan", "pay_fine")
    goal_makers = (make_loan_goal, make_return_goal, make_renewal_goal)

    def _get_loan(self, member_id: str, book_id: str) -> Loan:
        member, book = get_row(self.members, member_id, "member"), get_row(self.books, book_id, "book")
        if f"{member_id}{book_id}" not in self.loans:
            raise ActionRefused(f"{member.name} does not have {book.name}")
        return self.loans[f"{member_id}{book_id}"]
