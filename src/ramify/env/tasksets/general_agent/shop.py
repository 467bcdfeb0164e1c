"""A shop: customers order products."""

import random
from typing import Any, Literal

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
    """A customer."""

    name: str
    city: str


class ShopProduct(BaseModel):
    """A product."""

    name: str
    price: int
    stock: int


class ShopOrder(BaseModel):
    """An order of one product; `customer` and `product` are keys."""

    customer: str
    product: str
    quantity: int
    status: Literal["open", "shipped", "cancelled"]


class Shop(World):
    """Customers, products and orders."""

    customers: dict[str, Customer]
    products: dict[str, ShopProduct]
    orders: dict[str, ShopOrder]

    @classmethod
    def generate(cls, rng: random.Random, size: int) -> "Shop":
        """Return a shop with `size` customers, and products and orders."""
        customers = {
            f"C{n}": Customer(name=name, city=rng.choice(CITIES)) for n, name in enumerate(draw_people(rng, size))
        }
        prices = rng.sample(range(5, 95), min(size, len(PRODUCTS)))  # all different: one product is the cheapest
        products = {
            f"P{n}": ShopProduct(name=name, price=price, stock=rng.randint(3, 9))
            for n, (name, price) in enumerate(zip(rng.sample(PRODUCTS, len(prices)), prices))
        }
        orders: dict[str, ShopOrder] = {}
        for _ in range(size):
            customer, product = rng.choice(list(customers)), rng.choice(list(products))
            status: Literal["open", "shipped"] = "open" if rng.random() < 0.6 else "shipped"
            orders[f"{customer}{product}"] = ShopOrder(
                customer=customer, product=product, quantity=rng.randint(1, 3), status=status
            )
        return cls(customers=customers, products=products, orders=orders)

    def find_customer(self, name: str) -> dict[str, Any]:
        """Find a customer by name."""
        id = find_by_name(self.customers, name, "customer")
        return {"customer_id": id, **self.customers[id].model_dump()}

    def list_products(self) -> dict[str, Any]:
        """All products with price and stock."""
        return {id: product.model_dump() for id, product in self.products.items()}

    def list_orders(self, customer_id: str) -> dict[str, Any]:
        """The orders of a customer."""
        get_row(self.customers, customer_id, "customer")
        return {
            id: {"product": self.products[order.product].name, "quantity": order.quantity, "status": order.status}
            for id, order in self.orders.items()
            if order.customer == customer_id
        }

    def place_order(self, customer_id: str, product_id: str, quantity: int) -> str:
        """Order a product for a customer."""
        get_row(self.customers, customer_id, "customer")
        product = get_row(self.products, product_id, "product")
        if not 1 <= quantity <= product.stock:
            raise ActionRefused(f"quantity must be from 1 to {product.stock}, which is the stock of {product.name}")
        id = f"{customer_id}{product_id}"
        if id in self.orders and self.orders[id].status != "cancelled":
            raise ActionRefused(f"there is an order {id} already")
        product.stock -= quantity
        self.orders[id] = ShopOrder(customer=customer_id, product=product_id, quantity=quantity, status="open")
        return f"ordered: {id}"

    def cancel_order(self, order_id: str) -> str:
        """Cancel an open order."""
        order = get_row(self.orders, order_id, "order")
        if order.status != "open":
            raise ActionRefused(f"order {order_id} is {order.status}, only an open order can be cancelled")
        order.status = "cancelled"
        self.products[order.product].stock += order.quantity
        return "cancelled"

    def move_customer(self, customer_id: str, city: str) -> str:
        """Set the city of a customer."""
        get_row(self.customers, customer_id, "customer").city = city
        return "moved"

    def make_cancellation_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to cancel an open order."""
        open_orders = [id for id, order in self.orders.items() if order.status == "open"]
        if not open_orders:
            return None
        id = rng.choice(open_orders)
        order = self.orders[id]
        customer = self.customers[order.customer].name
        return make_goal(
            f"Cancel the order of {customer} for the {self.products[order.product].name}.",
            make_call("find_customer", name=customer),
            make_call("list_orders", customer_id=order.customer),
            make_call("cancel_order", order_id=id),
        )

    def make_order_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to order the cheapest or a named product."""
        customer = rng.choice(list(self.customers))
        cheapest = rng.random() < 0.5
        product = (
            min(self.products, key=lambda id: self.products[id].price) if cheapest else rng.choice(list(self.products))
        )
        if self.products[product].stock < 1 or f"{customer}{product}" in self.orders:
            return None
        quantity = rng.randint(1, min(3, self.products[product].stock))
        product_name = "cheapest product" if cheapest else self.products[product].name
        return make_goal(
            f"Order the {product_name} for {self.customers[customer].name}, quantity {quantity}.",
            make_call("find_customer", name=self.customers[customer].name),
            make_call("list_products"),
            make_call("place_order", customer_id=customer, product_id=product, quantity=quantity),
        )

    def make_move_goal(self, rng: random.Random) -> WorldGoal | None:
        """Draw the goal to change a customer's city."""
        customer = rng.choice(list(self.customers))
        city = rng.choice([city for city in CITIES if city != self.customers[customer].city])
        name = self.customers[customer].name
        return make_goal(
            f"{name} has moved to {city}; correct the city.",
            make_call("find_customer", name=name),
            make_call("move_customer", customer_id=customer, city=city),
        )

    tool_names = ("find_customer", "list_products", "list_orders", "place_order", "cancel_order", "move_customer")
    goal_makers = (make_cancellation_goal, make_order_goal, make_move_goal)
