"""Numbers and sets of them, as texts write them. Pure functions, in time proportional to the text.

Its files:

    numbers.py            numbers with their signs, currencies, percent, and in English words
    foreign_numbers.py    numbers in words of other languages
    sums.py               what equations come to, and what follows from two numbers
    units.py              units that change what a number means
    amounts.py            numbers as they stand alone, with their units, and one amount in two units
    ranges.py             intervals and inequalities
    equations.py          equations that are answers as a whole
    sizes.py              tells what would take long to compute
"""
