import { afterEach, describe, expect, it, vi } from "vitest";
import { type Progress, rangesOf, ServerSource } from "./server";

afterEach(() => vi.unstubAllGlobals());

function answering(...answers: Response[]) {
  const asked: [string, RequestInit][] = [];
  vi.stubGlobal("fetch", async (address: string, options: RequestInit) => {
    asked.push([address, options]);
    return answers.shift();
  });
  return asked;
}

describe("a server", () => {
  it("is asked again until the resource is ready, and says how far it is", async () => {
    vi.stubGlobal("setTimeout", (done: () => void) => done());
    const asked = answering(
      Response.json({ text: "Reading", done: 1, of: 4 }, { status: 202 }),
      Response.json({ a: 1 }),
    );
    const seen: (Progress | null)[] = [];
    const source = new ServerSource("data/", "secret", (progress) => seen.push(progress));

    expect(await source.json("run.json")).toEqual({ a: 1 });
    expect(seen).toEqual([{ text: "Reading", done: 1, of: 4 }, null]);
    expect(asked.map(([address]) => address)).toEqual(["data/run.json", "data/run.json"]);
    expect(asked[0]![1].headers).toEqual({ Authorization: "Bearer secret" });
  });

  it("has null for what is not there, and its own words for what failed", async () => {
    answering(new Response(null, { status: 204 }), new Response("The file is cut off.", { status: 422 }));
    const source = new ServerSource("data/", "", () => {});

    expect(await source.json("x.json")).toBeNull();
    await expect(source.json("run.json")).rejects.toThrow("The file is cut off.");
  });

  it("is asked for ranks in short", () => {
    expect([rangesOf([7, 0, 1, 2]), rangesOf([5]), rangesOf([1, 3])]).toEqual(["0-2,7", "5", "1,3"]);
  });
});
