"""Small SVG drawings, light and dark, without a plotting library: the files stay small and equal from run to run."""

from __future__ import annotations

from xml.sax.saxutils import escape

_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; fill: #57606a; }
.title { font-size: 14px; font-weight: 600; fill: #1f2328; }
.panel { font-size: 12px; font-weight: 600; fill: #1f2328; }
.value { fill: #1f2328; }
.small { font-size: 11px; }
.rule { stroke: #d0d7de; stroke-width: 1; fill: none; }
.grid { stroke: #eaeef2; stroke-width: 1; fill: none; }
.paper { fill: #ffffff; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.s0 { --c: #0969da; } .s1 { --c: #bf8700; } .s2 { --c: #8250df; } .s3 { --c: #6e7781; } .s4 { --c: #1a7f37; }
.fill { fill: var(--c); } .line { stroke: var(--c); } .dot { fill: var(--c); }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1; } .title, .panel, .value { fill: #f0f6fc; } .paper { fill: #0d1117; }
  .rule { stroke: #3d444d; } .grid { stroke: #21262d; }
  .s0 { --c: #4493f8; } .s1 { --c: #d29922; } .s2 { --c: #ab7df8; } .s3 { --c: #9198a1; } .s4 { --c: #3fb950; }
}
""".strip()


class Drawing:
    """Shapes in the order of drawing; coordinates in pixels from the top left."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        self._title = title
        self._shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, *, radius: float = 0) -> None:
        """A filled rectangle."""
        corner = f' rx="{radius:g}"' if radius else ""
        box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
        self._shapes.append(f'<rect class="{kind}" {box}{corner}/>')

    def line(self, points: list[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """A point of a curve."""
        self._shapes.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words at a baseline."""
        named = f' class="{kind}"' if kind else ""
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(f'<text{named} x="{x:.1f}" y="{y:.1f}"{placed}>{escape(words)}</text>')

    def render(self) -> str:
        """The file's text."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self._size} role="img">'
        parts = [head, f"<title>{escape(self._title)}</title>", f"<style>\n{_STYLE}\n</style>"]
        return (
            "\n".join([*parts, '<rect class="paper" width="100%" height="100%" rx="6"/>', *self._shapes, "</svg>"])
            + "\n"
        )
