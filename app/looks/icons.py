"""Icons in the colour of the theme, drawn from the SVG files in ``resources``."""

from __future__ import annotations

from functools import lru_cache

from PySide6.QtCore import QByteArray, QRectF, QSize, Qt
from PySide6.QtGui import QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer

from resources import icon_svg

_SIZES = (16, 20, 24, 32, 40, 48, 64, 96)


@lru_cache(maxsize=512)
def icon(name: str, colour: str = "#000000") -> QIcon:
    """The icon ``name`` with its lines in ``colour`` (``#rrggbb``), sharp at all usual sizes and scale factors."""
    result = QIcon()
    for size in _SIZES:
        result.addPixmap(pixmap(name, colour, size))
    return result


@lru_cache(maxsize=512)
def pixmap(name: str, colour: str, size: int, device_pixel_ratio: float = 1.0) -> QPixmap:
    """The icon as a square pixmap of ``size`` logical pixels."""
    renderer = QSvgRenderer(QByteArray(icon_svg(name).replace("currentColor", colour).encode()))
    pixels = round(size * device_pixel_ratio)
    image = QPixmap(QSize(pixels, pixels))
    image.fill(Qt.GlobalColor.transparent)
    painter = QPainter(image)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    renderer.render(painter, QRectF(0, 0, pixels, pixels))
    painter.end()
    image.setDevicePixelRatio(device_pixel_ratio)
    return image
