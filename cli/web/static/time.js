// Times for the eye, and one clock that every countdown of a page hangs on. What is left is counted from the moment the
// server said it, by a clock that nobody can set.

export function span(ms) {
  const s = Math.max(0, Math.ceil(ms / 1000));
  const [h, m] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60)];
  if (s >= 172800) return `${Math.floor(s / 86400)} days`;
  if (h) return `${h} h ${String(m).padStart(2, "0")} min`;
  return `${m}:${String(s % 60).padStart(2, "0")}`;
}

export function ago(iso, now) {
  const s = Math.max(0, Math.floor((now - Date.parse(iso)) / 1000));
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86400)} days ago`;
}

export function moment(iso) {
  return iso ? `${iso.slice(0, 10)} ${iso.slice(11, 19)} UTC` : "";
}

export class Countdown {
  // left: milliseconds; each(left) is called at once and each second; end() once, when nothing is left.
  constructor(left, each, end = () => {}) {
    this.until = performance.now() + left;
    this.each = each;
    this.end = end;
    this.tick();
  }

  get left() {
    return Math.max(0, this.until - performance.now());
  }

  set(left) {
    this.until = performance.now() + left;
    clearTimeout(this.timer);
    this.tick();
  }

  tick() {
    const left = this.left;
    this.each(left);
    if (left <= 0) return this.end();
    this.timer = setTimeout(() => this.tick(), left % 1000 || 1000);
  }

  stop() {
    clearTimeout(this.timer);
  }
}
