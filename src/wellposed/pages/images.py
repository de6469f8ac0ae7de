"""Pictures inside a page: PNG files as data addresses.

The pages of demo, certify and attack, with their pictures, are written by an installation without extras, and
Pillow comes with the extra `data` only; so `png` writes the few chunks of a file itself.
"""

import base64
import struct
import zlib

import numpy as np

from wellposed.pages.markup import Html, element

UP, DOWN = (31, 95, 208), (216, 88, 20)  # blue and orange, legible on light and dark pages
KINDS = {2: 0, 3: 2, 4: 6}  # of PNG, by the numbers of a pixel


def png(pixels: np.ndarray) -> bytes:
    """Writes bytes as a PNG file (Portable Network Graphics, third edition, W3C, 2025): no filter, one stream.

    Args:
        pixels: grey ``(height, width)``, coloured ``(height, width, 3)``, or ``(height, width, 4)`` with opacity.

    Example:
        >>> png(np.zeros((2, 3, 3), dtype=np.uint8))[:4]
        b'\\x89PNG'
    """
    height, width = pixels.shape[:2]
    kind = KINDS[2 if pixels.ndim == 2 else pixels.shape[2]]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def png_address(pixels: np.ndarray) -> str:
    """Writes an image of bytes as a data address.

    Example:
        >>> png_address(np.zeros((1, 1, 3), dtype=np.uint8))[:30]
        'data:image/png;base64,iVBORw0K'
    """
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def image(pixels: np.ndarray, text: str) -> Html:
    """Shows an image with a text for those who cannot see it.

    Example:
        >>> image(np.zeros((2, 2), dtype=np.uint8), "nothing")[-29:]
        'alt="nothing" class="pixels">'
    """
    return element("img", src=png_address(pixels), alt=text, class_="pixels")


def ink(picture: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Turns numbers into bytes: grey ones (height, width) as ink on paper, colours (height, width, 3) as they are.

    Example:
        >>> ink(np.array([[0.0, 1.0]])).tolist()
        [[255, 0]]
    """
    share = ((np.asarray(picture, dtype=float) - low) / (high - low)).clip(0, 1)
    return (255 * (1 - share if share.ndim == 2 else share)).round().astype(np.uint8)


def signed(matrix: np.ndarray, scale: float | None = None) -> np.ndarray:
    """Turns a matrix into pixels: blue above zero, orange below, stronger for larger entries, clear at zero.

    Args:
        scale: the entry of full strength; the largest if left out.

    Example:
        >>> signed(np.array([[0.0, -2.0]]))[0, :, 3].tolist()
        [0, 255]
    """
    values = np.asarray(matrix, dtype=float)
    largest = scale or float(np.abs(values).max(initial=0)) or 1.0
    strength = np.where(values == 0, 0.0, 0.2 + 0.8 * (np.abs(values) / largest).clip(0, 1))
    colours = np.where(values[..., None] > 0, UP, DOWN)
    return np.concatenate([colours, np.round(255 * strength)[..., None]], axis=-1).astype(np.uint8)


def pooled(matrix: np.ndarray, most: int) -> np.ndarray:
    """Shrinks a matrix to at most so many entries a side; of each square the entry of largest size stays.

    Example:
        >>> pooled(np.array([[1.0, -3.0, 0.0], [0.0, 2.0, 0.0]]), 2).tolist()
        [[-3.0, 0.0]]
    """
    side = -(-max(matrix.shape) // most)
    if side <= 1:
        return matrix
    rows, columns = (-(-size // side) for size in matrix.shape)
    padded = np.zeros((rows * side, columns * side), dtype=matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    squares = padded.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(rows, columns, -1)
    return np.asarray(np.take_along_axis(squares, np.abs(squares).argmax(-1)[..., None], -1)[..., 0])
