/// <reference types="vitest/config" />
import { defineConfig } from "vite";

// One script and one style sheet, which a report holds inline and `commtrace view` serves.
export default defineConfig({
  build: {
    outDir: "../assets",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "src/main.ts", formats: ["iife"], name: "commtrace", fileName: () => "viewer.js", cssFileName: "viewer" },
  },
  test: { environment: "happy-dom", include: ["src/**/*.test.ts"] },
});
