import { GUTTER } from "./layout";

/** The part of a step's time that is drawn, ns from its begin, and where it is on the canvas. */
export class Viewport {
  from = 0;
  to = 1;
  width = GUTTER + 1;
  private duration = 1;
  private least = 100;

  /** Sets limits: nothing narrower than `least` ns is shown, nor more than half of a step beside it. */
  limit(duration: number, least: number): void {
    this.duration = Math.max(duration, 1);
    this.least = Math.max(least, 100);
  }

  fit(): void {
    const margin = Math.max(1, this.duration * 0.005);
    this.look(-margin, this.duration + margin);
  }

  look(from: number, to: number): void {
    const margin = this.duration * 0.5;
    const span = Math.min(Math.max(to - from, this.least), this.duration + 2 * margin);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - span / 2, -margin), this.duration + margin - span);
    this.to = this.from + span;
  }

  zoom(factor: number, at = (GUTTER + this.width) / 2): void {
    const centre = this.time(at);
    this.look(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  pan(pixels: number): void {
    const shift = pixels * this.perPixel;
    this.look(this.from + shift, this.to + shift);
  }

  /** Nanoseconds per pixel. */
  get perPixel(): number {
    return (this.to - this.from) / Math.max(this.width - GUTTER, 1);
  }

  x(time: number): number {
    return GUTTER + (time - this.from) / this.perPixel;
  }

  time(x: number): number {
    return this.from + (x - GUTTER) * this.perPixel;
  }
}
