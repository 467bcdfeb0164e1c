"""Primes and divisors of whole numbers."""


def is_prime(number: int) -> bool:
    """Return whether a number is prime; numbers below 2 are not."""
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def factorize(number: int) -> list[int]:
    """Return the prime factors of a positive number, ascending, each as often as it divides: 12 -> [2, 2, 3]."""
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return factors


def sum_proper_divisors(number: int) -> int:
    """Return the sum of the divisors of a positive number that are smaller than it."""
    return sum(divisor for divisor in range(1, number // 2 + 1) if number % divisor == 0)


def greatest_common_divisor(first: int, second: int) -> int:
    """Return the largest number that divides both; gcd(0, n) is n. The result is never negative."""
    while second != 0:
        first, second = second, first % second
    return abs(first)
