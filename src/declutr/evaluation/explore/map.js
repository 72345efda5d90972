"use strict";
// The map: points on a canvas. Each group has its own colour and shape, for readers who cannot tell colours apart.

const SHAPES = [
  "M4,0A4,4 0 1 1 -4,0A4,4 0 1 1 4,0Z",
  "M-3.4,-3.4H3.4V3.4H-3.4Z",
  "M0,-4.8L4.4,3.2H-4.4Z",
  "M0,-5L5,0L0,5L-5,0Z",
  "M0,4.8L4.4,-3.2H-4.4Z",
  "M-1.5,-4.6H1.5V-1.5H4.6V1.5H1.5V4.6H-1.5V1.5H-4.6V-1.5H-1.5Z",
  "M-5,-3.6L0,-1.2L5,-3.6L1.6,4.4H-1.6Z",
  "M-4.6,-2H4.6V2H-4.6Z",
  "M2.6,0A2.6,2.6 0 1 1 -2.6,0A2.6,2.6 0 1 1 2.6,0Z",
];
const STAR = "M0,-10L2.4,-3.3L9.5,-3.1L3.8,1.3L5.9,8.1L0,4L-5.9,8.1L-3.8,1.3L-9.5,-3.1L-2.4,-3.3Z";
const REACH = 14; // maximum distance in pixels between the pointer and the point it selects
const MARGIN = 22;

/** A group's number among the colours; the last group is that of all other sources. */
function look(group, groups) {
  const others = group >= groups.length - 1;
  return { shape: SHAPES[others ? 8 : group], colour: others ? "--others" : `--group-${group}` };
}

/**
 * The map on a canvas. `told` is called with a point that is looked at, or null; `chosen` with one that is chosen.
 */
class TextMap {
  constructor(canvas, tip, told, chosen) {
    Object.assign(this, { canvas, tip, told, chosen });
    this.points = []; // all points of the map
    this.hits = []; // in rank order; some are points too
    this.origin = null; // the query, or the text whose neighbours the hits are
    this.groups = [];
    this.hidden = new Set();
    this.current = null;
    this.view = { zoom: 1, x: 0, y: 0 };
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointermove", event => this.moved(event));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("pointerdown", event => { this.dragged = false; this.from = [event.offsetX, event.offsetY]; });
    addEventListener("pointerup", () => { this.from = null; });
    canvas.addEventListener("click", event => {
      const point = this.dragged ? null : this.nearest(event.offsetX, event.offsetY);
      if (point) this.chosen(point);
    });
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey) return; // otherwise the page scrolls
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 300), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("keydown", event => this.pressed(event));
    canvas.addEventListener("blur", () => this.point(null));
  }

  show(points, groups) {
    Object.assign(this, { points, groups });
    this.mark([], null);
  }

  /** Takes other hits; everything, the origin too, has room on the map. */
  mark(hits, origin) {
    Object.assign(this, { hits, origin });
    this.bounds = { left: Infinity, right: -Infinity, low: Infinity, high: -Infinity };
    for (const { x, y } of [...this.points, ...hits, ...(origin ? [origin] : [])]) {
      this.bounds.left = Math.min(this.bounds.left, x);
      this.bounds.right = Math.max(this.bounds.right, x);
      this.bounds.low = Math.min(this.bounds.low, y);
      this.bounds.high = Math.max(this.bounds.high, y);
    }
    this.point(null);
  }

  toggle(group, shown) {
    if (shown) this.hidden.delete(group); else this.hidden.add(group);
    this.point(null);
  }

  /** What can be pointed at. */
  visible() {
    return [...this.points, ...this.hits].filter(point => !this.hidden.has(point.group));
  }

  /** Place of a point in CSS pixels from the canvas's upper left corner. Both axes have the same scale. */
  place(point) {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    const { left, right, low, high } = this.bounds;
    const scale = Math.min((width - 2 * MARGIN) / (right - left || 1), (height - 2 * MARGIN) / (high - low || 1));
    const { zoom, x, y } = this.view;
    return [
      width / 2 + zoom * (scale * (point.x - (left + right) / 2) + x),
      height / 2 + zoom * (scale * ((low + high) / 2 - point.y) + y),
    ];
  }

  nearest(x, y) {
    let found = null, least = REACH * REACH;
    for (const point of this.visible()) {
      const [px, py] = this.place(point);
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance <= least) [found, least] = [point, distance];
    }
    return found;
  }

  moved(event) {
    if (this.from && event.buttons) {
      const [x, y] = [event.offsetX - this.from[0], event.offsetY - this.from[1]];
      if (!this.dragged && Math.hypot(x, y) < 4) return; // small movements count as a click
      this.dragged = true;
      this.from = [event.offsetX, event.offsetY];
      this.view.x += x / this.view.zoom;
      this.view.y += y / this.view.zoom;
      this.point(null);
      return;
    }
    const point = this.nearest(event.offsetX, event.offsetY);
    if (point !== this.current) this.point(point);
  }

  /** Zooms about a place that stays where it is. */
  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const old = this.view.zoom, zoom = Math.min(64, Math.max(1, old * factor));
    const shift = 1 / zoom - 1 / old;
    this.view = zoom === 1 ? { zoom, x: 0, y: 0 } : {
      zoom,
      x: this.view.x + (x - this.canvas.clientWidth / 2) * shift,
      y: this.view.y + (y - this.canvas.clientHeight / 2) * shift,
    };
    this.point(null);
  }

  pressed(event) {
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (arrows[event.key]) this.step(...arrows[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && this.current) this.chosen(this.current);
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.zoom(0);
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
  }

  /** To the nearest point that lies more in a direction than aside of it; the first time to the best hit, or the middle. */
  step(dx, dy) {
    const inside = this.visible().map(point => [point, ...this.place(point)])
      .filter(([, x, y]) => x >= 0 && y >= 0 && x <= this.canvas.clientWidth && y <= this.canvas.clientHeight);
    let from = [this.canvas.clientWidth / 2, this.canvas.clientHeight / 2], allowed = () => true;
    if (this.current) {
      from = this.place(this.current);
      allowed = (along, aside) => along > 0.5 && aside <= along;
    } else if (this.hits.length && !this.hidden.has(this.hits[0].group)) {
      from = this.place(this.hits[0]);
    }
    let found = null, least = Infinity;
    for (const [point, x, y] of inside) {
      const along = (x - from[0]) * dx + (y - from[1]) * dy;
      const aside = Math.abs((x - from[0]) * dy) + Math.abs((y - from[1]) * dx);
      const distance = along * along + 4 * aside * aside;
      if (distance < least && allowed(along, aside)) [found, least] = [point, distance];
    }
    if (found) this.point(found);
  }

  /** Looks at a point: its text beside it, its place ringed; null looks at none. */
  point(point) {
    this.current = point;
    this.canvas.style.cursor = point ? "pointer" : "";
    this.tip.hidden = !point;
    this.told(point);
    if (point) {
      const [x, y] = this.place(point);
      const width = this.canvas.clientWidth - this.tip.offsetWidth, height = this.tip.offsetHeight;
      this.tip.style.left = `${Math.max(0, Math.min(x + 14, width))}px`;
      this.tip.style.top = `${y > height + 18 ? y - height - 14 : y + 16}px`;
    }
    this.draw();
  }

  draw() {
    const { canvas } = this, ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width || !this.points.length) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink"), ground = style.getPropertyValue("--panel");
    const put = (point, path, fill, stroke, scale = 1) => {
      const [x, y] = this.place(point);
      context.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * x, ratio * y);
      if (stroke) { context.lineWidth = 4 / scale; context.strokeStyle = stroke; context.stroke(path); }
      if (fill) { context.fillStyle = fill; context.fill(path); }
    };
    const looks = this.groups.map((_, group) => {
      const { shape, colour } = look(group, this.groups);
      return { path: new Path2D(shape), colour: style.getPropertyValue(colour) };
    });
    context.globalAlpha = this.hits.length ? 0.4 : 0.75; // hits stand out
    for (const point of this.points) {
      if (!this.hidden.has(point.group)) put(point, looks[point.group].path, looks[point.group].colour);
    }
    context.globalAlpha = 1;
    const marked = [...this.hits, ...(this.current ? [this.current] : [])].filter(point => !this.hidden.has(point.group));
    for (const point of marked) put(point, looks[point.group].path, looks[point.group].colour, ink, 1.5);
    if (this.origin) put(this.origin, new Path2D(STAR), ink, ground);
    context.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
    this.hits.forEach((point, index) => {
      if (this.hidden.has(point.group)) return;
      const [x, y] = this.place(point);
      context.setTransform(ratio, 0, 0, ratio, ratio * x, ratio * y);
      context.lineWidth = 4;
      context.strokeStyle = ground;
      context.strokeText(index + 1, 9, -7);
      context.fillStyle = ink;
      context.fillText(index + 1, 9, -7);
    });
  }
}
