"""A shop: customers order products."""

import random
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from ramify.tasksets.general_agent.world import Goal, Refused, World, call, named, people, row

CITIES = ("Oslo", "Lima", "Kyoto", "Cairo", "Porto", "Quito", "Turin", "Basel", "Accra", "Perth")
PRODUCTS = (
    "lamp",
    "chair",
    "kettle",
    "mirror",
    "carpet",
    "basket",
    "hammer",
    "pillow",
    "ladder",
    "teapot",
    "clock",
    "radio",
    "bench",
    "candle",
)


class Customer(BaseModel):
    name: str
    city: str


class Product(BaseModel):
    name: str
    price: int
    stock: int


class Order(BaseModel):
    customer: str
    product: str
    quantity: int
    status: Literal["open", "shipped", "cancelled"]


class Shop(World):
    """Customers, products and orders."""

    customers: dict[str, Customer]
    products: dict[str, Product]
    orders: dict[str, Order]

    @classmethod
    def make(cls, rng: random.Random, size: int) -> "Shop":
        customers = {f"C{n}": Customer(name=name, city=rng.choice(CITIES)) for n, name in enumerate(people(rng, size))}
        prices = rng.sample(range(5, 95), min(size, len(PRODUCTS)))  # all different: one product is the cheapest
        products = {
            f"P{n}": Product(name=name, price=price, stock=rng.randint(3, 9))
            for n, (name, price) in enumerate(zip(rng.sample(PRODUCTS, len(prices)), prices))
        }
        orders: dict[str, Order] = {}
        for _ in range(size):
            customer, product = rng.choice(list(customers)), rng.choice(list(products))
            status: Literal["open", "shipped"] = "open" if rng.random() < 0.6 else "shipped"
            orders[f"{customer}{product}"] = Order(
                customer=customer, product=product, quantity=rng.randint(1, 3), status=status
            )
        return cls(customers=customers, products=products, orders=orders)

    def tools(self) -> list[Callable[..., Any]]:
        return [
            self.find_customer,
            self.list_products,
            self.list_orders,
            self.place_order,
            self.cancel_order,
            self.move_customer,
        ]

    def find_customer(self, name: str) -> dict[str, Any]:
        """Find a customer by name."""
        id = named(self.customers, name, "customer")
        return {"customer_id": id, **self.customers[id].model_dump()}

    def list_products(self) -> dict[str, Any]:
        """All products with price and stock."""
        return {id: product.model_dump() for id, product in self.products.items()}

    def list_orders(self, customer_id: str) -> dict[str, Any]:
        """The orders of a customer."""
        row(self.customers, customer_id, "customer")
        return {
            id: {"product": self.products[order.product].name, "quantity": order.quantity, "status": order.status}
            for id, order in self.orders.items()
            if order.customer == customer_id
        }

    def place_order(self, customer_id: str, product_id: str, quantity: int) -> str:
        """Order a product for a customer."""
        row(self.customers, customer_id, "customer")
        product = row(self.products, product_id, "product")
        if not 1 <= quantity <= product.stock:
            raise Refused(f"quantity must be from 1 to {product.stock}, which is the stock of {product.name}")
        id = f"{customer_id}{product_id}"
        if id in self.orders and self.orders[id].status != "cancelled":
            raise Refused(f"there is an order {id} already")
        product.stock -= quantity
        self.orders[id] = Order(customer=customer_id, product=product_id, quantity=quantity, status="open")
        return f"ordered: {id}"

    def cancel_order(self, order_id: str) -> str:
        """Cancel an open order."""
        order = row(self.orders, order_id, "order")
        if order.status != "open":
            raise Refused(f"order {order_id} is {order.status}, only an open order can be cancelled")
        order.status = "cancelled"
        self.products[order.product].stock += order.quantity
        return "cancelled"

    def move_customer(self, customer_id: str, city: str) -> str:
        """Set the city of a customer."""
        row(self.customers, customer_id, "customer").city = city
        return "moved"

    def cancelling(self, rng: random.Random) -> Goal | None:
        running = [id for id, order in self.orders.items() if order.status == "open"]
        if not running:
            return None
        id = rng.choice(running)
        order = self.orders[id]
        customer = self.customers[order.customer].name
        return Goal(
            f"Cancel the order of {customer} for the {self.products[order.product].name}.",
            (
                call("find_customer", name=customer),
                call("list_orders", customer_id=order.customer),
                call("cancel_order", order_id=id),
            ),
        )

    def buying(self, rng: random.Random) -> Goal | None:
        customer = rng.choice(list(self.customers))
        cheapest = rng.random() < 0.5
        product = (
            min(self.products, key=lambda id: self.products[id].price) if cheapest else rng.choice(list(self.products))
        )
        if self.products[product].stock < 1 or f"{customer}{product}" in self.orders:
            return None
        quantity = rng.randint(1, min(3, self.products[product].stock))
        what = "cheapest product" if cheapest else self.products[product].name
        return Goal(
            f"Order the {what} for {self.customers[customer].name}, quantity {quantity}.",
            (
                call("find_customer", name=self.customers[customer].name),
                call("list_products"),
                call("place_order", customer_id=customer, product_id=product, quantity=quantity),
            ),
        )

    def moving(self, rng: random.Random) -> Goal | None:
        customer = rng.choice(list(self.customers))
        city = rng.choice([city for city in CITIES if city != self.customers[customer].city])
        name = self.customers[customer].name
        return Goal(
            f"{name} has moved to {city}; correct the city.",
            (call("find_customer", name=name), call("move_customer", customer_id=customer, city=city)),
        )

    goals = (cancelling, buying, moving)
