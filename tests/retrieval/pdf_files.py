"""PDFs from the operators of their pages, with what stands beside the text."""

from collections.abc import Sequence


def pdf_of(
    *pages: str,
    objects: Sequence[str] = (),
    catalog: str = "",
    page: str = "",
    resources: str = "/Properties << /L1 100 0 R >>",
) -> bytes:
    """Pages with these operators and Helvetica as /F1. `objects` have the numbers 100, 101, ...;
    the first is the layer /L1. `catalog`, `page` and `resources` are further entries of their
    dictionaries.
    """
    count = len(pages)
    kids = " ".join(f"{10 + 2 * i} 0 R" for i in range(count))
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    resources = f"<< /Font << /F1 3 0 R >> {resources} >>"
    made = {
        1: f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        2: f"<< /Type /Pages /Kids [{kids}] /Count {count} >>",
        3: font,
    }
    for i, operators in enumerate(pages):
        made[10 + 2 * i] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources {resources} "
            f"/Contents {11 + 2 * i} 0 R {page} >>"
        )
        made[11 + 2 * i] = f"<< /Length {len(operators)} >>\nstream\n{operators}\nendstream"
    made |= {100 + i: one for i, one in enumerate(objects)}
    out = "%PDF-1.5\n"
    table = "xref\n0 1\n0000000000 65535 f \n"
    for number, body in sorted(made.items()):
        table += f"{number} 1\n{len(out):010} 00000 n \n"
        out += f"{number} 0 obj\n{body}\nendobj\n"
    end = f"trailer\n<< /Size {max(made) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return f"{out}{table}{end}".encode("latin-1")


def text_at(y: int, *shown: str, x: float = 72) -> str:
    """Operators that show texts from a point on. A text "7^5:6" is in size 7 and raised by 5."""
    operators = [f"BT {x} {y} Td /F1 12 Tf"]
    for one in shown:
        size, is_raised, rest = one.partition("^")
        if is_raised:
            rise, _, text = rest.partition(":")
            operators.append(f"/F1 {size} Tf {rise} Ts ({text}) Tj 0 Ts /F1 12 Tf")
        else:
            operators.append(f"({one}) Tj")
    return " ".join([*operators, "ET"])
