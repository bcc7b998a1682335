"""Checks on the page itself that texts are large enough and have enough contrast. Disabled controls are exempt."""

from __future__ import annotations

from typing import Any

SCRIPT = """(root) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const ground = (e) => {
    if (!e) return [255, 255, 255, 1];
    const own = rgba(getComputedStyle(e).backgroundColor);
    return own[3] > 0.99 ? own : over(own, ground(e.parentElement));
  };
  const light = (c) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = c.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const e of document.querySelectorAll(`${root} *`)) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!(own || e.matches("input[type=text],select")) || !e.checkVisibility()) continue;
    if (e.closest(".twb-sr,.twb-sign") || e.disabled || e.closest("option")) continue;
    const style = getComputedStyle(e), back = ground(e), ink = over(rgba(style.color), back);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    found.push([e.textContent.trim().slice(0, 30) || e.className, parseFloat(style.fontSize), (a + 0.05) / (b + 0.05)]);
  }
  return found;
}"""


def texts(page: Any, root: str = ".twb") -> list[tuple[str, float, float]]:
    """Returns (text, size in px, contrast) of every visible text under `root`."""
    return [tuple(t) for t in page.evaluate(SCRIPT, root)]


def hard_to_read(page: Any, root: str = ".twb") -> list[tuple[str, float, float]]:
    """Returns the texts under 14 px or with a contrast under 4.5, WCAG's level AA."""
    return [t for t in texts(page, root) if t[1] < 14 or t[2] < 4.5]


CUT = """(root) => [...document.querySelectorAll(`${root}, ${root} *`)].filter((e) => {
  if (!e.checkVisibility() || !e.clientWidth || e.closest(".twb-sr, svg, select, .wb-table, pre")) return false;
  return e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline" && !e.matches("input, textarea");
}).map((e) => `${e.tagName} ${e.className}: ${e.scrollWidth} in ${e.clientWidth}`)"""

TOUCHING = """(selector) => {
  const all = [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility() && e.textContent.trim());
  const boxes = all.map((e) => [e, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);
  const found = [];
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 1 && high > 3 && !a.contains(b) && !b.contains(a)) found.push(`${a.textContent} / ${b.textContent}`);
  }));
  return found;
}"""


def cut_off(page: Any, root: str) -> list[str]:
    """Returns elements under `root` wider than their box, except scrolling ones (data tables, code)."""
    return list(page.evaluate(CUT, root))


def touching(page: Any, selector: str) -> list[str]:
    """Returns pairs of overlapping texts among the visible elements that match `selector`."""
    return list(page.evaluate(TOUCHING, selector))
