"""Formulas (MathML, and Office's OMML) as one line of text: "(a+b)/2", "x^2", "sqrt(x)",
"sum_(i=1)^n i". `elements` takes what a parser gives, `rules` has one for each name, `texts` puts
parts beside each other.
"""

from .elements import Formula, formula_text

__all__ = ["Formula", "formula_text"]
