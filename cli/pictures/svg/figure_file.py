"""Files of figures: SVG as it is drawn, or PDF where a file's name ends so."""

from __future__ import annotations

import re
from pathlib import Path

from ....profiles.errors import UserError
from ....profiles.files import PDF_MARK, write_bytes

_SIZE = re.compile(r'width="[^"]*" height="[^"]*" viewBox="0 0 ([\d.]+) ([\d.]+)"')


def write_figure(path: str, svg: str) -> None:
    """Write a figure as what its name says.

    Raises:
        FileError: it can't be written.
        UserError: it would be PDF, and what makes PDF isn't installed.
    """
    pdf = Path(path).suffix.lower() == ".pdf"
    write_bytes(path, as_pdf(path, svg) if pdf else svg.encode())


def as_pdf(path: str, svg: str) -> bytes:
    """A drawing as PDF: lines and text stay what they are, fonts are within. The same drawing gives
    the same bytes on the same machine.

    Raises UserError, which names the file, where what it takes isn't installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise UserError(
            f"{path}: PDF takes the package vl-convert-python: in the checkout, "
            "pip install -e '.[pdf]'; or let the name end in .svg"
        ) from None
    # It makes a point of each pixel, and a drawing's own unit is the point.
    in_points = _SIZE.sub(r'width="\1" height="\2" viewBox="0 0 \1 \2"', svg, count=1)
    pdf: bytes = vl_convert.svg_to_pdf(in_points)
    # What stands behind the end is a comment; by it the file is known as ours.
    return pdf.rstrip() + b"\n" + PDF_MARK + b"\n"
