import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { ServerSource } from "../data/server";
import { offerPerfetto } from "./perfetto";

const PERFETTO_UI = "https://perfetto.example";
const trace = new ArrayBuffer(4);
const source = {
  bytes: async (name: string) => (name === "step/3/perfetto" ? trace : null),
} as unknown as ServerSource;

function opened() {
  const sent: unknown[][] = [];
  const ui = { closed: false, postMessage: (...message: unknown[]) => sent.push(message) };
  vi.stubGlobal("open", () => ui);
  return { ui: ui as unknown as Window, sent };
}

function answer(from: Window, origin: string, data: unknown) {
  const event = new MessageEvent("message", { origin, data });
  Object.defineProperty(event, "source", { value: from });
  window.dispatchEvent(event);
}

const settled = () => vi.advanceTimersByTimeAsync(250);
const button = () => document.getElementById("open-perfetto") as HTMLButtonElement;
const state = () => document.getElementById("perfetto-state")!.textContent;

beforeEach(() => {
  vi.useFakeTimers();
  document.documentElement.dataset.perfetto = PERFETTO_UI;
  document.body.innerHTML = '<button id="open-perfetto" hidden></button><span id="perfetto-state"></span>';
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe("the button", () => {
  it("sends the trace of the step in view once the UI answers, and to nobody else", async () => {
    const { ui, sent } = opened();
    offerPerfetto(source, "commtrace · run", () => 3);
    expect(button().hidden).toBe(false);

    button().click();
    await settled();
    expect(sent).toEqual([
      ["PING", PERFETTO_UI],
      ["PING", PERFETTO_UI],
    ]);
    answer(ui, "https://elsewhere.example", "PONG");
    answer(window, PERFETTO_UI, "PONG");
    answer(ui, PERFETTO_UI, "PING");
    await Promise.resolve();
    expect(sent.length).toBe(2);

    answer(ui, PERFETTO_UI, "PONG");
    await settled();
    expect(sent.slice(2)).toEqual([
      [{ perfetto: { buffer: trace, title: "commtrace: run: step 3" } }, PERFETTO_UI, [trace]],
    ]);
    expect(button().disabled).toBe(false);
  });

  it("says so where the UI cannot be reached, the browser blocks it, or the step has no trace", async () => {
    opened();
    let step = 3;
    offerPerfetto(source, "run", () => step);
    button().click();
    await vi.advanceTimersByTimeAsync(61_000);
    expect(state()).toContain("does not answer");

    step = 4;
    button().click();
    await settled();
    expect(state()).toBe("There is no trace of step 4.");

    vi.stubGlobal("open", () => null);
    button().click();
    expect(state()).toContain("did not let this page open");
  });
});
