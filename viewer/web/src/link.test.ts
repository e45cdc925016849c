import { expect, it } from "vitest";
import { readView, writeView } from "./link";

it("a link holds the view", () => {
  const view = { view: "time", step: 12, from: -5, to: 1_000_000, rows: "tensor group", colour: "microbatch" };
  expect(readView(writeView(view))).toEqual(view);
});

it("a damaged link is ignored", () => {
  expect(readView("#step=x&rows")).toEqual({ view: null, step: null, from: null, to: null, rows: "", colour: null });
});
