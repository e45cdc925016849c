// Colours of a heat map: one hue from faint to strong, so that only lightness matters.

import type { Theme } from "../theme";

const STOPS = 5; // --heat-0 is the faintest
const STEPS = 64;

type Colour = readonly [red: number, green: number, blue: number];

/** Colours from faint to strong, with a text colour for each. */
export class Ramp {
  private readonly colours: Colour[];

  constructor(theme: Theme) {
    const stops = Array.from({ length: STOPS }, (_, index) => parsed(theme.of(`heat-${index}`)));
    this.colours = Array.from({ length: STEPS }, (_, index) => between(stops, index / (STEPS - 1)));
  }

  /** The colour at a place from 0 (faint) to 1 (strong); places beyond are cut off. */
  at(place: number): string {
    return `rgb(${this.colour(place).join(" ")})`;
  }

  textAt(place: number): string {
    const [red, green, blue] = this.colour(place);
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#1b1b1b" : "#ffffff";
  }

  private colour(place: number): Colour {
    return this.colours[Math.round(Math.min(Math.max(place, 0), 1) * (STEPS - 1))]!;
  }
}

function parsed(hex: string): Colour {
  const number = Number.parseInt(hex.slice(1), 16);
  return [(number >> 16) & 255, (number >> 8) & 255, number & 255];
}

function between(stops: readonly Colour[], place: number): Colour {
  const index = Math.min(Math.floor(place * (stops.length - 1)), stops.length - 2);
  const share = place * (stops.length - 1) - index;
  const mix = (channel: 0 | 1 | 2) =>
    Math.round(stops[index]![channel] * (1 - share) + stops[index + 1]![channel] * share);
  return [mix(0), mix(1), mix(2)];
}
